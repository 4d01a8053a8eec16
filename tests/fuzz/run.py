"""``make fuzz``: every target in turn, for so many seconds each; what was run is counted.

Inputs that are new go to .cache/fuzz/corpus, those that break something to .cache/fuzz/crashes.
With ``--record`` the counts become the page docs/reference/fuzzing.md; with ``--minimise`` the
smallest inputs that reach everything known replace those in tests/fuzz/corpus.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from tests.fuzz import archives, native, seeds
from tests.fuzz.page import write_page
from tests.fuzz.targets import PYTHON

ROOT: Final = native.ROOT
CACHE: Final = ROOT / ".cache" / "fuzz"
SEEDS: Final = CACHE / "seeds"
UNPACKED: Final = CACHE / "unpacked"
RESULTS: Final = Path(__file__).parent / "results.json"
MOST_BYTES: Final = 4096
KEPT_FILES: Final = 60
KEPT_BYTES: Final = 10 * 1024
"""Of one target's corpus in the tree; all of them together stay below 300 KiB."""
_EXECUTED: Final = re.compile(r"stat::number_of_executed_units:\s+(\d+)")
_COVERED: Final = re.compile(r"\bcov: (\d+)")


def _command(name: str) -> list[str] | None:
    """How to start libFuzzer on a target; None where that is not possible."""
    if name in PYTHON:
        if importlib.util.find_spec("atheris") is None:
            return None
        return [sys.executable, "-m", "tests.fuzz.drive", name, "atheris"]
    program = native.build(name, libfuzzer=True)
    return None if program is None else [str(program)]


def _unpack(name: str) -> Path:
    """Write a target's corpus anew as files."""
    folder = UNPACKED / name
    shutil.rmtree(folder, ignore_errors=True)
    archives.unpack(archives.load(name), folder)
    return folder


def _search(name: str, command: list[str], seconds: float, runs: int) -> dict[str, Any]:
    fresh, crashes = CACHE / "corpus" / name, CACHE / "crashes" / name
    for folder in (fresh, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    seeds.write(name, SEEDS / name)
    _unpack(name)
    known = [folder / name for folder in (UNPACKED, seeds.REGRESSIONS, SEEDS)]
    limits = [f"-max_total_time={seconds:.0f}"] if seconds else []
    limits += [f"-runs={runs}"] if runs else []
    begun = time.monotonic()
    done = subprocess.run(
        [
            *command,
            *limits,
            f"-max_len={MOST_BYTES}",
            "-timeout=20",
            "-rss_limit_mb=2048",
            "-print_final_stats=1",
            f"-artifact_prefix={crashes}/",
            str(fresh),
            *(str(folder) for folder in known if folder.is_dir()),
        ],
        check=False,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    executed, covered = _EXECUTED.findall(done.stdout), _COVERED.findall(done.stdout)
    if done.returncode:
        (crashes / "log.txt").write_text(done.stdout, encoding="utf-8")
    return {
        "executions": int(executed[-1]) if executed else 0,
        "coverage": int(covered[-1]) if covered else 0,
        "seconds": round(time.monotonic() - begun, 1),
        "crashes": int(done.returncode != 0),
    }


def minimise(name: str, command: list[str]) -> None:
    """Replaces a target's corpus by small inputs that reach much; never by none."""
    scratch, found, known = CACHE / "merged" / name, CACHE / "corpus" / name, _unpack(name)
    shutil.rmtree(scratch, ignore_errors=True)
    for place in (scratch, found):
        place.mkdir(parents=True, exist_ok=True)
    if name not in PYTHON:
        places = [str(SEEDS / name), str(known), str(found)]
        merge = [*command, "-merge=1", f"-max_len={MOST_BYTES}", str(scratch), *places]
        subprocess.run(merge, check=True, cwd=ROOT, capture_output=True)
    # Under atheris a merge comes back with nothing; each of what was found reached something new.
    kept = list(scratch.iterdir()) or [*known.iterdir(), *found.iterdir()]
    chosen, room = [], KEPT_BYTES
    for file in sorted(kept, key=lambda file: file.stat().st_size):
        room -= file.stat().st_size
        if room >= 0 and len(chosen) < KEPT_FILES:
            chosen.append(file.read_bytes())
    archives.save(name, chosen)


def _versions() -> dict[str, str]:
    clang = shutil.which("clang")
    done = subprocess.run(
        [clang or "true", "--version"], check=False, capture_output=True, text=True
    )
    number = re.search(r"version (\S+)", done.stdout)
    return {
        "clang": number[1] if number else "none",
        "atheris": metadata.version("atheris") if importlib.util.find_spec("atheris") else "none",
        "python": platform.python_version(),
        "unionai-sandbox": metadata.version("unionai-sandbox"),
    }


def _merged(before: dict[str, Any], found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Several runs of a target on the same day, with the same tools, are one campaign.

    Targets that were not run keep their last campaign, with its date.
    """
    today, versions = dt.datetime.now(dt.UTC).date().isoformat(), _versions()
    is_same = before.get("versions") == versions
    for result in found.values():
        result["date"] = today
    for name, earlier in before.get("targets", {}).items():
        now = found.setdefault(name, earlier)
        if now is not earlier and is_same and earlier["date"] == today:
            for key in ("executions", "seconds", "crashes"):
                now[key] = round(now[key] + earlier[key], 1)
            now["coverage"] = max(now["coverage"], earlier["coverage"])
    return {"versions": versions, "targets": found}


def main() -> int:
    """Reads the command line; 1 if anything broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for each target")
    parser.add_argument("--runs", type=int, default=0, help="at most so many for each target")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--minimise", action="store_true")
    parser.add_argument("targets", nargs="*", help="all, if none is named")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for name in options.targets or (*native.NAMES, *PYTHON):
        command = _command(name)
        if command is None:
            print(f"{name:<22} not run: pip install --group fuzz, or {native.REMEDY}", flush=True)
            continue
        result = found[name] = _search(name, command, options.seconds, options.runs)
        print(
            f"{name:<22} {result['executions']:>12,} executions {result['seconds']:>8.1f} s"
            f"  coverage {result['coverage']:>5}" + ("  BROKEN" if result["crashes"] else ""),
            flush=True,
        )
        if options.minimise and not result["crashes"]:
            minimise(name, command)
    total = sum(result["executions"] for result in found.values())
    broken = [name for name, result in found.items() if result["crashes"]]
    print(f"{'all':<22} {total:>12,} executions")
    for name in broken:
        print(f"{name}: see {CACHE / 'crashes' / name}")
    if options.record:
        before = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(_merged(before, found), indent=1) + "\n", encoding="utf-8")
        write_page()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
