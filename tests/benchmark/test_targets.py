"""The targets are computed from the results of one run. No test here checks a measured number."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bench import report, targets
from bench.__main__ import KEPT, PAGE, arguments
from bench.contenders import BARE, OURS

if TYPE_CHECKING:
    from pathlib import Path


def results() -> dict[str, Any]:
    def measure(name: str, ratio: float, **more: float) -> dict[str, Any]:
        ours = {"ratio": ratio} | more
        return {"name": name, "results": {BARE: {"ratio": 1.0}, OURS: ours, targets.USERNS: ours}}

    return {
        "measures": [
            measure("cell", 0.09),
            measure("cell_after_pause", 0.11),
            measure("context", 0.02),
            measure("run_code_x1", 3.5),
            measure("run_code_x4", 2.0),
            measure("run_true_machine", 0.9, beside=1.05),
        ],
        "contexts": [
            {"contender": OURS, "contexts": 1000, "mib_each": 5.0},
            {"contender": BARE, "contexts": 2, "mib_each": 50.0},
        ],
        "machine_files": {"userns": {"read": (0.1, 0.3, 2.0)}},
        "synchronous": {"userns": {"stat": (0.2, 0.1), "exec": (1.0, 1.5)}},
    }


def test_each_value_is_compared_with_its_target() -> None:
    found = [(one.title, one.contender, one.holds) for one in targets.rows(results())]
    for contender in (OURS, targets.USERNS):
        assert ("a cell of a context, in a row", contender, True) in found
        assert ("a cell of a context, after a pause", contender, False) in found
        assert ("open a context, first cell", contender, False) in found
        assert ("`run_code`, one after another, rate", contender, True) in found
        assert ("`run_code`, 4 at once, rate", contender, False) in found
        assert ('`run("true")`, `persist="machine"`', contender, True) in found
    assert ("read 10 kB in a machine", targets.USERNS, False) in found
    assert ("synchronous stat: overhead", targets.USERNS, True) in found
    assert ("synchronous exec: overhead", targets.USERNS, False) in found
    memory = [(one.value, one.holds) for one in targets.rows(results()) if "memory" in one.title]
    assert memory == [(0.1, True), (5.0, True)]


def test_a_missing_peer_has_no_row() -> None:
    given = results()
    given["contexts"] = given["contexts"][:1]
    del given["measures"][0]
    titles = [(one.title, one.compared) for one in targets.rows(given)]
    assert not any(title == "a cell of a context, in a row" for title, _ in titles)
    assert [compared for title, compared in titles if "memory" in title] == [""]


def test_every_target_is_a_measure_that_exists() -> None:
    assert arguments(list(targets.NAMES)).names == list(targets.NAMES)


def test_the_page_has_room_for_the_table_and_shows_kept_results(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    found = [asdict(one) for one in targets.rows(results())]
    report.put_between(page, targets.BEGIN, targets.END, targets.table(found))
    assert "| a cell of a context, in a row | ipykernel |" in page.read_text(encoding="utf-8")
    kept = KEPT / "targets.json"
    shown = PAGE.read_text(encoding="utf-8").split(targets.BEGIN)[1].split(targets.END)[0].strip()
    wanted = targets.markdown(json.loads(kept.read_text(encoding="utf-8"))) if kept.exists() else ""
    assert shown == wanted
