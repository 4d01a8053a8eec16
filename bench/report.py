"""Render the results as text for the terminal and the page, from the JSON only."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from bench.contenders import BARE, OURS, REMOTE

if TYPE_CHECKING:
    from pathlib import Path

Results = dict[str, Any]
BEGIN, END = "<!-- bench: begin, written by make bench -->", "<!-- bench: end -->"
NOTHING = "-"


def terminal(results: Results) -> str:
    """Return all results in columns."""
    lines = [facts(results)]
    lines.append(f"\n{'':<30} {'median':>9} {'':<6} {'± %':>4} {'p99/p50':>8} {'x bare':>7}")
    for measure in results["measures"]:
        lines.append(f"{measure['title']} (bare: {measure['bare']})".replace("`", ""))
        for name, found in measure["results"].items():
            tail = f"{found['p99'] / found['median']:.1f}" if measure["unit"] == "ms" else ""
            lines.append(
                f"  {name:<28} {found['median']:>9.5g} {measure['unit']:<6} "
                f"{found['spread'] * 100:>4.0f} {tail:>8} {found['ratio']:>7.2f}"
            )
        lines += [f"  {name:<28} {why}" for name, why in measure["dropped"].items()]
    lines += ["", *_idle_lines(results)]
    lines += [f"{name}: left out: {why}" for name, why in results["left_out"].items()]
    lines.append(
        "ms: lower is better; MiB/s and runs/s: higher is better. ± is half the quartile range."
    )
    return "\n".join(lines)


def _idle_lines(results: Results) -> list[str]:
    held, dropped = results["idle"]["results"], results["idle"]["dropped"]
    return [
        *(f"{one['sessions']:>5} idle sessions, {one['contender']}: {_idle(one)}" for one in held),
        *(f"idle sessions, {name}: {why}" for name, why in dropped.items()),
        *(_context(one) for one in results.get("contexts", ())),
    ]


def _context(one: Results) -> str:
    name = "ipykernel" if one["contender"] == BARE else one["contender"]
    return (
        f"{one['contexts']:>5} contexts with pandas, {name}: open {one['open_ms']:.1f} ms each; "
        f"{one['mib_each']:.2f} MiB each, {one['processes']} processes"
    )


def _idle(found: Results) -> str:
    states = [("just opened", found["opened"])]
    if "idle" in found:
        states.append(("later", found["idle"]))
    parts = [
        f"{when} {state['mib_each']:.2f} MiB each, {state['processes']} processes"
        for when, state in states
    ]
    return f"open {found['open_ms']:.1f} ms each; " + "; ".join(parts)


def facts(results: Results) -> str:
    """Describe the environment of the measurement."""
    about = results["about"]
    who = "root" if about["root"] else "an ordinary user"
    peers = ", ".join(
        f"{name} {version}" if version else name
        for name, version in about["versions"].items()
        if name not in {BARE, OURS, REMOTE}
    )
    return (
        f"{about['date']}, version {about['version']}: {about['cpus']} processors "
        f"({about['processor']}), Linux {about['kernel']}, Python {about['python']}, as {who}, "
        f"load {about['load_before']:.1f} before and {about['load_after']:.1f} after."
        + (f" Compared with: {peers}." if peers else "")
    )


def names(results: Results) -> list[str]:
    """Return the contenders with results, without the bare one; ours first."""
    found = dict.fromkeys(name for m in results["measures"] for name in m["results"])
    return [name for name in found if name != BARE]


def markdown(results: Results) -> str:
    """Return the tables of the page."""
    times = [m for m in results["measures"] if m["unit"] == "ms"]
    rates = [m for m in results["measures"] if m["unit"] != "ms"]
    parts = [
        facts(results),
        "**Times**, as multiples of the same without a sandbox: lower is better.",
        _table(times, names(results), tail=True),
        "**Rates**, as multiples of the same without a sandbox: higher is better.",
        _table(rates, names(results), tail=False),
        "**Idle sessions**: memory per session (proportional set size) and processes.",
        _idle_table(results),
    ]
    return "\n\n".join(part for part in parts if part)


def _table(measures: list[Results], columns: list[str], *, tail: bool) -> str:
    columns = [name for name in columns if any(name in m["results"] for m in measures)]
    header = ["", "bare", *columns, *([f"{OURS}: p99/p50"] if tail else [])]
    rows = [header, ["---", *["--:"] * (len(header) - 1)]]
    for measure in measures:
        found = measure["results"]
        bare = f"{measure['bare']}: {_number(found[BARE]['median'])} {measure['unit']}"
        row = [measure["title"], bare, *(_ratio(found, name) for name in columns)]
        if tail:
            row.append(_tail(found))
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _ratio(found: Results, name: str) -> str:
    if name not in found:
        return NOTHING
    shown = f"{found[name]['ratio']:.2f}"
    return f"**{shown}**" if name == OURS else shown


def _tail(found: Results) -> str:
    return f"{found[OURS]['p99'] / found[OURS]['median']:.1f}" if OURS in found else NOTHING


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _idle_table(results: Results) -> str:
    found = results["idle"]["results"]
    if not found:
        return ""
    rows = [
        ["", "sessions", "open, each", "just opened", "", "after 20 s", ""],
        ["---", *["--:"] * 6],
    ]
    for one in found:
        later = one.get("idle")
        rows.append(
            [
                one["contender"],
                f"{one['sessions']:,}",
                f"{one['open_ms']:.1f} ms",
                f"{one['opened']['mib_each']:.2f} MiB",
                _processes(one["opened"]),
                f"{later['mib_each']:.2f} MiB" if later else NOTHING,
                _processes(later) if later else NOTHING,
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _processes(state: Results) -> str:
    number = state["processes"]
    return f"{number} process" if number == 1 else f"{number} processes"


def put_in(page: Path, results: Results) -> None:
    """Write the tables between the marks of the page."""
    put_between(page, BEGIN, END, markdown(results))


def put_between(page: Path, begin: str, end: str, content: str) -> None:
    """Replace what the page has between two marks."""
    text = page.read_text(encoding="utf-8")
    marked = re.compile(f"(?<={re.escape(begin)}\n).*?(?={re.escape(end)})", re.DOTALL)
    if len(marked.findall(text)) != 1:
        raise ValueError(f"{page} must have {begin} and {end} once")
    page.write_text(marked.sub(lambda _: f"\n{content}\n\n", text), encoding="utf-8")
