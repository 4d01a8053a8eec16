"""The figures on the pages come from `speed.py`, which works. No test fails for being slow."""

from __future__ import annotations

import pytest
from tests.environments import speed


@pytest.mark.timeout(200)
def test_every_operation_is_measured_bare_and_in_a_session() -> None:
    if (reason := speed.lacking("landlock")) is not None:
        pytest.skip(reason)
    found = speed.measure("landlock", rounds=1, forks=10, turns=1)
    assert set(found) == {name for pair in speed.LINES.values() for name in pair}
    assert all(seconds > 0 for seconds in found.values())
    made = speed.table(found)
    assert made.count("\n") == 2 + len(speed.LINES)


@pytest.mark.parametrize("name", speed.PLACES)
def test_the_page_has_a_row_for_each_operation(name: str) -> None:
    place = speed.PLACES[name]
    text = place.page.read_text(encoding="utf-8")
    table = text.split(f"<!-- {place.mark}: begin -->\n")[1].split("<!--")[0]
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()[2:]}
    assert set(rows) == set(speed.LINES)
    if name == "landlock":
        fork = rows[list(speed.LINES)[-1]]
        assert float(fork.split("|")[-2]) <= speed.FORK_LIMIT, "the page promises this"
