"""The tree contains no path of a development machine and names the package index once."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from union.sandbox.constants import PYPI_HOSTS

ROOT = Path(__file__).resolve().parents[2]
NAMES_THE_INDEX = Path("src/union/sandbox/constants.py")
NOT_OURS = {".cache", ".git", ".venv", ".hypothesis", "build", "dist", "site", "__pycache__"}

# Placeholder users, and files that an attacker would look for in a home directory.
EXAMPLE_USERS = "alice|bob|me|nobody|runner|someone|user|you"
COVETED = r"\.(?:ssh|aws|bash|config|kube|netrc|profile)|secret"
# Not preceded by what makes it the tail of a longer or computed path. Character classes keep the
# patterns from matching themselves.
START = r"(?<![\w.~})*-])"
MACHINE_PATHS = [
    rf"{START}/home/(?!(?:{EXAMPLE_USERS})\b)[a-z]",
    rf"{START}/Users/(?!(?:{EXAMPLE_USERS})\b)\w",
    rf"{START}/root/(?!{COVETED})[\w.]",
    rf"{START}/wor[k]/[a-z.]",
    rf"{START}/opt/(?:whee[l]s|pyp[i])",
]
INDEX_HOSTS = [re.escape(host.removeprefix("*.")) for host in PYPI_HOSTS]


def tracked_or_new() -> list[Path]:
    """List what is, or could be, committed; everything if this is not a checkout."""
    try:
        done = subprocess.run(
            # The checkout may belong to another user than the one who runs the tests.
            ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-zco", "--exclude-standard"],
            check=True,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except (OSError, subprocess.CalledProcessError):
        found = []
        for folder, folders, files in os.walk(ROOT):
            folders[:] = [name for name in folders if name not in NOT_OURS]
            found += [Path(folder, name).relative_to(ROOT) for name in files]
        return sorted(found)
    return sorted(Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name)


def text_of(path: Path) -> str:
    """Return the file's text; nothing for a binary, a link, or a file just removed."""
    full = ROOT / path
    if full.is_symlink() or not full.is_file():
        return ""
    content = full.read_bytes()
    return "" if b"\0" in content[:8192] else content.decode("utf-8", errors="replace")


def hits(patterns: list[str], *, exempt: frozenset[Path] = frozenset()) -> list[str]:
    wanted = re.compile("|".join(patterns))
    return [
        f"{path}:{number}: {line.strip()[:120]}"
        for path in tracked_or_new()
        if path not in exempt
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        if wanted.search(line)
    ]


def test_the_scan_sees_the_tree():
    assert NAMES_THE_INDEX in tracked_or_new()
    assert hits(INDEX_HOSTS), "the constants themselves must be found"


@pytest.mark.parametrize(
    "line",
    ["see /" + "root/.pyenv/bin", "'/" + "home/jane/x'", "cd /" + "work/tree", "/" + "opt/wheels"],
)
def test_a_machine_path_is_recognised(line: str):
    assert re.search("|".join(MACHINE_PATHS), line)


@pytest.mark.parametrize(
    "line",
    ["cat /root/.ssh/id_rsa", "/home/alice/project", "{base}/work/x", "/tmp/sandbox-work/a"],
)
def test_an_example_path_is_not(line: str):
    assert not re.search("|".join(MACHINE_PATHS), line)


def test_no_path_of_a_particular_machine():
    assert hits(MACHINE_PATHS) == []


def test_the_index_hosts_are_named_in_one_place():
    assert hits(INDEX_HOSTS, exempt=frozenset({NAMES_THE_INDEX})) == []
