"""Judge all adapters by their frameworks' tests: ``python -m scripts.adapters [NAME ...]``.

Prints the counts of each suite and each failure. With ``RECORD=1`` it writes the table of
docs/adapters/index.md; with ``LATEST=1`` it uses the newest versions of the frameworks. The exit
code is the number of suites that failed.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.adapters.runner import (  # noqa: E402 - the path comes first
    BACKENDS,
    CACHE,
    FRAMEWORKS,
    Framework,
    IndexUnreachableError,
    Outcome,
    judge,
)

RESULTS = CACHE / "results.json"
"""The results of earlier runs: a run of some suites keeps those of the others."""
PAGE = ROOT / "docs" / "adapters" / "index.md"
BEGIN, END = "<!-- begin: make test-adapters -->\n", "<!-- end -->\n"


def recorded(page: str) -> dict[str, dict[str, str]]:
    """Return the results that the page shows, of suites and versions that are still the same."""
    rows = page.partition(BEGIN)[2].partition(END)[0].splitlines()
    shown = {cells[-3]: cells[-2] for cells in (re.split(r" ?\| ?", row) for row in rows)}
    found: dict[str, dict[str, str]] = {}
    for name, framework in FRAMEWORKS.items():
        for result in filter(None, shown.get(tests_of(framework), "").split("; ")):
            backend, _, text = result.partition(": ")
            found.setdefault(name, {})[backend] = text
    return found


def tests_of(framework: Framework) -> str:
    """Return the description of a suite, with the versions of its packages."""
    return f"{framework.what} ({', '.join(framework.needs).replace('==', ' ')})"


def table(results: dict[str, dict[str, str]]) -> str:
    """Return the table of the page, from the results of each suite by backend."""
    lines = ["| framework | use | install | tests | result |", "|---|---|---|---|---|"]
    for name, framework in FRAMEWORKS.items():
        shown = framework.title
        if framework.page:
            shown = f"[{shown}]({framework.page})"
        use = framework.classes
        if not use.startswith("sbx"):
            use = f"adapters.{framework.module}: {use}"
        extra = framework.extra or framework.module
        install = f"`pip install '.[{extra}]'`"
        if extra == "e2b":
            install = "`pip install .`"
        found = results.get(name, {})
        shown_results = "; ".join(f"{key}: {text}" for key, text in found.items())
        lines.append(f"| {shown} | `{use}` | {install} | {tests_of(framework)} | {shown_results} |")
    return "\n".join(lines) + "\n"


def summary(outcome: Outcome) -> str:
    """Return the counts as text."""
    counts = outcome.counts
    text = f"{counts['passed']} passed"
    for key in ("failed", "skipped", "known"):
        if counts[key]:
            text += f", {counts[key]} {key}"
    return text


def main(names: list[str]) -> int:
    """Judge the adapters named, or all; return the number of suites that failed."""
    page = PAGE.read_text(encoding="utf-8")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else recorded(page)
    bad = 0
    for name in names or FRAMEWORKS:
        for backend in BACKENDS:
            began = time.monotonic()
            try:
                outcome = judge(name, backend)
            except IndexUnreachableError as exc:
                print(f"{name} {backend}: the environment could not be made: {exc}", flush=True)
                bad += 1
                continue
            results.setdefault(name, {})[backend] = summary(outcome)
            RESULTS.write_text(json.dumps(results))
            took = time.monotonic() - began
            print(f"{name} {backend}: {summary(outcome)} in {took:.0f} s", flush=True)
            for test, message in outcome.failures.items():
                print(f"    {test}: {message}", flush=True)
            bad += bool(outcome.failures)
    if os.environ.get("RECORD") == "1":
        head, _, rest = page.partition(BEGIN)
        PAGE.write_text(head + BEGIN + table(results) + END + rest.partition(END)[2])
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
