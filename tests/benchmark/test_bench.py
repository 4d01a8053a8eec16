"""The benchmark runs and writes well-formed results. No test here checks a number."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest
from bench import chart, keep, machine_files, report, synchronous
from bench.__main__ import KEPT, PAGE, Progress, arguments
from bench.contenders import BARE, OURS, ROOT, ContenderError, Worker, all_contenders
from bench.measures import MEASURES, summary, take_turns

if TYPE_CHECKING:
    from pathlib import Path

SOME = ["open", "run_true", "run_true_cold", "run_code", "request", "run_true_x4", "put", "idle"]
NUMBERS = {"median", "ratio", "spread", "p99", "samples"}


def bars_in(svg: str) -> int:
    return sum(element.tag.endswith("}rect") for element in ET.fromstring(svg).iter())


def check(results: report.Results) -> None:
    """Check that every value is a number, and that the tables and the chart show all of them."""
    for measure in results["measures"]:
        assert {BARE, OURS} <= set(measure["results"])
        assert measure["results"][BARE]["ratio"] == 1
        for found in measure["results"].values():
            assert set(found) == NUMBERS
            assert all(isinstance(value, int | float) and value >= 0 for value in found.values())
    for found in results["idle"]["results"]:
        assert found["open_ms"] > 0
        assert found["opened"]["processes"] >= 0
    text, table = report.terminal(results), report.markdown(results)
    for measure in results["measures"]:
        assert measure["title"].replace("`", "") in text
        assert len(re.findall(f"^\\| {re.escape(measure['title'])} \\|", table, re.MULTILINE)) == 1
    lines = [line for line in table.splitlines() if line.startswith("|")]
    blocks = re.findall(r"(?:^\|.*\n?)+", table, re.MULTILINE)
    assert sum(len(block.splitlines()) for block in blocks) == len(lines)
    for block in blocks:
        assert len({line.count("|") for line in block.splitlines()}) == 1
    shown = [m for m in results["measures"] if m["name"] in chart.SHOWN]
    assert bars_in(chart.svg(results)) == sum(len(m["results"]) - 1 for m in shown)


def test_a_short_run_without_peers_writes_numbers_table_and_chart(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "--scale", "0.01", "--without-peers"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path), *SOME],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    shown = done.stderr.splitlines()
    assert all(re.match(r" *\d+ s  \d+ of \d+  |written: ", line) for line in shown), done.stderr
    results = json.loads((tmp_path / "latest.json").read_text(encoding="utf-8"))
    assert [m["name"] for m in results["measures"]] == [n for n in SOME if n != "idle"]
    assert [m["dropped"] for m in results["measures"]] == [{}] * (len(SOME) - 1)
    assert {one["sessions"] for one in results["idle"]["results"]} == {1}
    assert done.stdout == report.terminal(results) + "\n"
    assert (tmp_path / "latest.svg").read_text(encoding="utf-8") == chart.svg(results)
    check(results)


def test_kept_results_are_complete_and_shown_in_the_page() -> None:
    results = json.loads((KEPT / "latest.json").read_text(encoding="utf-8"))
    assert [m["name"] for m in results["measures"]] == [m.name for m in MEASURES]
    check(results)
    ours = [one for one in results["idle"]["results"] if one["contender"] == OURS]
    assert [one["sessions"] for one in ours] == [1, 100, 1000]
    assert all("idle" in one for one in ours)
    between = PAGE.read_text(encoding="utf-8").split(report.BEGIN)[1].split(report.END)[0]
    assert between.strip() == report.markdown(results)
    assert (KEPT / "latest.svg").read_text(encoding="utf-8") == chart.svg(results)
    assert "](bench/results/latest.svg)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_are_written_between_the_marks_only(tmp_path: Path) -> None:
    results = json.loads((KEPT / "latest.json").read_text(encoding="utf-8"))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n", encoding="utf-8")
    for _ in range(2):
        report.put_in(page, results)
    written = page.read_text(encoding="utf-8")
    wanted = f"before\n{report.BEGIN}\n\n{report.markdown(results)}\n\n{report.END}\nafter\n"
    assert written == wanted
    page.write_text("no marks\n", encoding="utf-8")
    with pytest.raises(ValueError, match="must have"):
        report.put_in(page, results)


async def test_bare_and_ours_support_every_measure() -> None:
    wanted = {measure.operation for measure in MEASURES}
    for contender in all_contenders(1, peers=False):
        if contender.driver == "remote":
            continue  # Some measures do not apply to a server.
        worker = await Worker(contender).start()
        try:
            assert worker.operations >= wanted, contender.name
        finally:
            await worker.close()


async def test_a_contender_that_fails_is_dropped_with_the_reason() -> None:
    bare = all_contenders(1, peers=False)[0]
    broken = replace(bare, name="broken", options=bare.options | {"prefix": ["/bin/false"]})
    workers = [await Worker(one).start() for one in (bare, broken)]
    try:
        measure = next(m for m in MEASURES if m.name == "run_true")
        found = await take_turns(measure, workers, scale=0.01, note=lambda _: None)
        assert set(found["results"]) == {BARE}
        assert found["dropped"] == {"broken": "RuntimeError: /bin/false ended with 1"}
        # Without the bare contender there is no baseline.
        workers[1].contender = replace(broken, name=BARE)
        with pytest.raises(ContenderError, match="run_true, bare: RuntimeError"):
            await take_turns(measure, workers[1:], scale=0.01, note=lambda _: None)
    finally:
        for worker in workers:
            await worker.close()


async def test_a_contender_that_cannot_start_reports_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("bench.contenders.PEERS", tmp_path)
    missing = [one for one in all_contenders(1, peers=True) if one.missing]
    assert {one.name for one in missing} == {
        "unionai-sandbox userns",
        "unionai-sandbox bubblewrap",
        "sandlock",
        "bwrap",
        "runsc",
    }
    for one in missing:
        with pytest.raises(ContenderError, match=r"not installed|not on the PATH"):
            await Worker(one).start()
    ours = all_contenders(1, peers=False)[1]
    wrong = replace(ours, options=ours.options | {"backend": "nonsense"})
    with pytest.raises(ContenderError, match="nonsense"):
        await Worker(wrong).start()
    # A process that ends without a reply.
    with pytest.raises(ContenderError, match="No module named"):
        await Worker(replace(ours, driver="nothing")).start()


def test_summary_has_median_spread_and_tail() -> None:
    assert summary([1.0, 2.0, 3.0, 4.0], [5.0] * 4) == {
        "median": 2.5,
        "ratio": 0.5,
        "spread": 0.5,
        "p99": 3.97,
        "samples": 4,
    }
    once = summary([3.0], [1.0] * 4)
    assert (once["median"], once["ratio"], once["spread"], once["p99"]) == (3, 3, 0, 3)


def test_progress_is_one_line_on_a_terminal_and_a_line_for_each_step_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for watched in (True, False):
        stderr = io.StringIO()
        monkeypatch.setattr(stderr, "isatty", lambda watched=watched: watched)
        monkeypatch.setattr(sys, "stderr", stderr)
        progress = Progress(2)
        progress.step("first")
        progress.note("round 1 of 3")
        progress.done()
        assert ("1 of 2  first  round 1 of 3" in stderr.getvalue()) == watched
        assert ("\r" in stderr.getvalue()) == watched
        assert watched or stderr.getvalue().strip() == "0 s  1 of 2  first"


def answered(monkeypatch: pytest.MonkeyPatch, typed: str, *, terminal: bool) -> tuple[bool, str]:
    stdin, stderr = io.StringIO(typed), io.StringIO()
    for stream in (stdin, stderr):
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(sys, "stderr", stderr)
    return keep.may_write(given=None), stderr.getvalue()


def test_tracked_files_are_rewritten_only_if_a_person_agrees(monkeypatch: pytest.MonkeyPatch):
    for typed, expected in (
        ("y\n", True),
        ("yes\n", True),
        ("n\n", False),
        ("\n", False),
        ("", False),
    ):
        agreed, shown = answered(monkeypatch, typed, terminal=True)
        assert agreed is expected, typed
        assert "rewrite docs/benchmarks.md and bench/results? [y/N]" in shown
    agreed, shown = answered(monkeypatch, "y\n", terminal=False)
    assert not agreed
    assert "make bench WRITE=1" in shown
    assert keep.may_write(given=True)  # --write asks nothing
    assert not keep.may_write(given=False)


def test_only_a_complete_run_is_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert arguments([]).output == KEPT
    assert arguments([]).kept
    for given in (["--quick"], ["open"], ["--without-peers"], ["--scale", "0.5"]):
        options = arguments(given)
        assert (options.output == KEPT, options.kept) == (False, False), given
    assert not arguments(["--output", str(tmp_path)]).kept
    for given in (["--scale", "0"], ["nothing"]):
        with pytest.raises(SystemExit):
            arguments(given)
        assert (
            "--scale must be" in (error := capsys.readouterr().err) or "unknown: nothing" in error
        )


def test_file_calls_of_a_machine_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert machine_files.main(["--rounds", "1"]) in {0, 1}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(machine_files.CALLS)


def test_the_cost_of_synchronous_calls_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert synchronous.main(["--rounds", "2"]) in {0, 1}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(synchronous.CALLS)
