"""Run the unit tests and the contract on every Python that this machine has.

`make test-pythons` looks for interpreters on PATH, below ~/.pyenv and among those of uv. Each has a
virtualenv below .cache. It runs them on one backend, without the slow ones, and adds the tests of
waiting Pythons, which depend on how an interpreter starts and ends. Prints one line per version:
what ran, and with which result. With RECORD=1 the results also become rows of
docs/reference/requirements.md.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from scripts.check import MARKS

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
TESTS = ("tests/unit", "tests/contract", "tests/spares", "--only-way=userns")
OPTIONS = ("-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "-m", MARKS)
PAGE = ROOT / "docs/reference/requirements.md"
BEGIN, END = (
    "<!-- pythons: begin, written by make test-pythons RECORD=1 -->",
    "<!-- pythons: end -->",
)
HEAD = ("| Python | tests | result | date |", "|---|---|---|---|")


def recorded(text: str, python: str, tests: str, result: str, *, date: str) -> str:
    """Return the page with one result; it replaces that of the same version and tests."""
    before, rest = text.split(BEGIN)
    table, after = rest.split(END)
    rows = [tuple(line.strip("| ").split(" | ")) for line in table.strip().splitlines()[2:]]
    minor = python.rpartition(".")[0]
    kept = [row for row in rows if (row[0].rpartition(".")[0], row[1]) != (minor, f"`{tests}`")]
    kept.append((python, f"`{tests}`", result, date))
    kept.sort(key=lambda row: (tuple(map(int, row[0].split("."))), row[1]))
    lines = "\n".join([*HEAD, *(f"| {' | '.join(row)} |" for row in kept)])
    return f"{before}{BEGIN}\n{lines}\n{END}{after}"


def counts(summary: str) -> str:
    """Return the counts of pytest's last line, without the time."""
    found = re.findall(r"(\d+) (passed|failed|skipped|errors?|xfailed)", summary)
    return ", ".join(f"{int(number):,} {kind}" for number, kind in found) or "no tests"


def interpreters() -> dict[str, str]:
    """Return the newest interpreter of each version."""
    places = [
        *(found for v in VERSIONS if (found := shutil.which(f"python{v}"))),
        *glob.glob(os.path.expanduser("~/.pyenv/versions/3.*/bin/python3")),
        *glob.glob(os.path.expanduser("~/.local/share/uv/python/cpython-3.*/bin/python3")),
        *glob.glob(os.environ.get("PYTHONS", "")),
    ]
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for place in places:
        done = subprocess.run(
            [place, "-c", "import sys; print(*sys.version_info[:3])"],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode == 0:
            numbers = tuple(map(int, done.stdout.split()))
            version = ".".join(map(str, numbers[:2]))
            if numbers > found.get(version, ((), ""))[0]:
                found[version] = (numbers, place)
    return {version: place for version, (_, place) in found.items() if version in VERSIONS}


def run(version: str, python: str, tests: tuple[str, ...]) -> tuple[bool, str]:
    """Install the tree for one interpreter and run the tests; return whether they pass, and how."""
    place = ROOT / ".cache" / f"python{version}"
    own = place / "bin/python"
    uv = Path(sys.executable).with_name("uv")
    try:
        if not (place / ".installed").exists():
            subprocess.run([str(uv), "venv", "-q", "--clear", "-p", python, str(place)], check=True)
            install = [str(uv), "pip", "install", "-q", "--python", str(own)]
            subprocess.run([*install, "--group", f"{ROOT}/pyproject.toml:dev"], check=True)
            subprocess.run([*install, "--editable", str(ROOT)], check=True)
            (place / ".installed").touch()
    except subprocess.CalledProcessError as exc:
        return False, f"could not be installed: {exc}"
    done = subprocess.run(
        [str(own), "-m", "pytest", *OPTIONS, *tests],
        check=False,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0:
        sys.stdout.write("\n".join(lines[-40:]) + "\n")
    return done.returncode == 0, re.sub(r"=+", "", lines[-1]).strip() if lines else "no output"


def main(arguments: list[str]) -> int:
    """Run the tests on the named versions, or on all that are found."""
    found = interpreters()
    failed = False
    for version in arguments or VERSIONS:
        if version not in found:
            print(f"python {version}: not on this machine; `uv python install {version}`")
            failed = failed or bool(arguments)
            continue
        part = os.environ.get("PART", "").split()
        is_good, summary = run(version, found[version], (*(part or TESTS[:-1]), TESTS[-1]))
        print(f"python {version}: {summary}", flush=True)
        if os.environ.get("RECORD"):
            asked = [found[version], "-c", "import platform; print(platform.python_version())"]
            done = subprocess.run(asked, check=True, capture_output=True, text=True)
            today = datetime.now(UTC).date().isoformat()
            named = " ".join(part or TESTS[:-1])
            text = PAGE.read_text(encoding="utf-8")
            text = recorded(text, done.stdout.strip(), named, counts(summary), date=today)
            PAGE.write_text(text, encoding="utf-8")
        failed = failed or not is_good
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
