"""What the suites gave inside gVisor: counted by module, kept, and shown on a page.

`make test-gvisor RECORD=1` counts what it runs, `PART=...` included, and writes the page.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from tests import kernel_facts
from tests.environments import runsc
from tests.environments.suite import PROJECT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

RESULTS: Final = PROJECT / "tests" / "environments" / "gvisor_results.json"
PAGE: Final = PROJECT / "docs" / "reference" / "portability.md"
PLACES: Final = ("uid 1000", "root")
FACTS: Final = tuple(kernel_facts.FACTS)
SUITES: Final = ("tests/contract", "tests/escape", "tests/posture", "tests/network")
NO_TESTS: Final = frozenset(
    {"tests/escape/test_remote.py", "tests/network/test_credentials_over_server.py"}
)
"""Modules of which no test is one of `userns` on the device."""
EXCEPTION: Final = "exception"
_COUNTS: Final = ("<!-- gvisor-counts: begin -->", "<!-- gvisor-counts: end -->")
_EXCEPTIONS: Final = ("<!-- gvisor: begin -->", "<!-- gvisor: end -->")
_WORDS: Final = {"PASSED": "passed", "FAILED": "failed", "ERROR": "failed", "XPASS": "passed"}
# Lines of pytest's short summary. With a reason, which begins with the name of the fact.
_LINE: Final = re.compile(
    r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) (?:at \w+ of )?(tests/\S+?\.py)(?:::(.*))?$"
)
_SKIPPED: Final = re.compile(r"^SKIPPED \[(\d+)\] (tests/\S+?\.py):\d+:")
_REASON: Final = re.compile(rf" - (?:\[NOTRUN\] )?({'|'.join(kernel_facts.FACTS)}): ")

Modules = dict[str, dict[str, int]]


def by_module(output: str) -> Modules:
    """Return for each module how many tests ended how, from what `-rpfExXs` prints.

    A test that is expected to fail is counted as `exception: FACT`.
    """
    found: dict[str, Counter[str]] = {}
    for line in output.splitlines():
        if skipped := _SKIPPED.match(line):
            found.setdefault(skipped[2], Counter())["skipped"] += int(skipped[1])
        elif ended := _LINE.match(line):
            word = _WORDS.get(ended[1])
            if word is None:
                reason = _REASON.search(line)
                word = f"{EXCEPTION}: {reason[1]}" if reason else "xfailed"
            found.setdefault(ended[2], Counter())[word] += 1
    return {module: dict(sorted(found[module].items())) for module in sorted(found)}


def kept() -> dict[str, Any]:
    """Return what was recorded."""
    recorded: dict[str, Any] = json.loads(RESULTS.read_text("utf-8"))
    return recorded


def record(place: str, modules: Modules) -> None:
    """Replace what is kept of these modules in a place, and write the page."""
    recorded = kept() if RESULTS.exists() else {"places": {}}
    recorded["date"] = dt.datetime.now(dt.UTC).date().isoformat()
    known = recorded["places"].get(place, {}) | modules
    # A module that was renamed or removed has no count any more.
    recorded["places"][place] = {
        name: known[name] for name in sorted(known) if (PROJECT / name).exists()
    }
    recorded["absent"] = _absent(recorded["places"])
    RESULTS.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    write_page(PAGE)


def write_page(page: Path) -> None:
    page.write_text(rewritten(page.read_text("utf-8")), encoding="utf-8")


def rewritten(page: str) -> str:
    """Return the page with both tables as they are kept."""
    recorded = kept()
    places: Mapping[str, Modules] = recorded["places"]
    facts = {fact: [_exceptions(places.get(place, {}), fact) for place in PLACES] for fact in FACTS}
    text = f"The release of {runsc.RELEASE}, on {recorded['date']}:\n\n{_suites(places)}"
    for title, found in (("Failed", _failed(places)), ("Without a result", recorded["absent"])):
        text += "".join(f"\n\n{title} as {place}: {names}." for place, names in found)
    return _between(_between(page, _COUNTS, text), _EXCEPTIONS, kernel_facts.table(facts))


def _suites(places: Mapping[str, Modules]) -> str:
    titles = [f"{place}, {what}" for place in PLACES for what in ("passed", "exceptions")]
    lines = [f"| suite | {' | '.join(titles)} |", f"|---{'|--:' * len(titles)}|"]
    totals = [0] * len(titles)
    for suite in SUITES:
        cells: list[int] = []
        for place in PLACES:
            mine = [
                counted
                for name, counted in places.get(place, {}).items()
                if name.startswith(f"{suite}/")
            ]
            cells += [sum(one.get("passed", 0) for one in mine), sum(map(_excepted, mine))]
        totals = [total + cell for total, cell in zip(totals, cells, strict=True)]
        lines.append(f"| `{suite}` | {' | '.join(map(str, cells))} |")
    lines.append(f"| all | {' | '.join(map(str, totals))} |")
    return "\n".join(lines)


def _failed(places: Mapping[str, Modules]) -> list[tuple[str, str]]:
    """Return for each place the modules with failures, and how many."""
    found = []
    for place, modules in places.items():
        counted = {
            name: one.get("failed", 0) + one.get("xfailed", 0) for name, one in modules.items()
        }
        names = [f"`{name}` ({number})" for name, number in counted.items() if number]
        if names:
            found.append((place, ", ".join(names)))
    return found


def _absent(places: Mapping[str, Modules]) -> list[tuple[str, str]]:
    """Return for each place what of the suites has no count, if anything has none."""
    found = []
    for place in PLACES:
        names: list[str] = []
        for suite in SUITES:
            modules = {f"{suite}/{path.name}" for path in (PROJECT / suite).glob("test_*.py")}
            missing = sorted(modules - places.get(place, {}).keys() - NO_TESTS)
            whole = len(missing) == len(modules - NO_TESTS)
            names += [suite] if whole and missing else missing
        if names:
            found.append((place, ", ".join(f"`{name}`" for name in names)))
    return found


def _excepted(counted: Mapping[str, int]) -> int:
    return sum(number for word, number in counted.items() if word.startswith(EXCEPTION))


def _exceptions(modules: Modules, fact: str) -> int:
    return sum(counted.get(f"{EXCEPTION}: {fact}", 0) for counted in modules.values())


def _between(page: str, marks: tuple[str, str], text: str) -> str:
    before, rest = page.split(marks[0])
    return f"{before}{marks[0]}\n{text}\n{marks[1]}{rest.split(marks[1])[1]}"
