"""With a feature of the kernel switched off, a session reports it or is refused with the remedy."""

from __future__ import annotations

import pytest
from tests.environments import floor

NOT_LAYERS = {"memory watch", "layers copy"}
"""Reported, but no layer of the isolation: how a limit is enforced, how a checkpoint is kept. So
strict=True does not refuse it."""
NEEDED = ("pidfd", "close-range", "seccomp")
"""Without these, no backend works."""


@pytest.mark.spec("G1", "B9")
@pytest.mark.threat(114)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", floor.FEATURES)
def test_a_missing_feature_is_reported_or_refused(name: str) -> None:
    if (reason := floor.lacking(name)) is not None:
        pytest.skip(reason)
    found, complete = floor.look(name), floor.complete_for(name)
    opened = 0
    for backend, results in found.items():
        assert complete[backend]["plain"]["stdout"] == "inside\n", "the positive control"
        for kind, result in results.items():
            if "isolation" not in result:
                assert result["code"] == "backend-unavailable", result
                assert result["hint"], result
                assert "please report this" not in result["hint"], result
                continue
            opened += 1
            assert result["stdout"] == "inside\n"
            assert result["followed"] == [], "a link is never followed, whatever opens it"
            if kind == "strict":
                whole = complete[backend]["strict"]["isolation"]
                assert set(floor.differences(whole, result["isolation"])) <= NOT_LAYERS
    assert (opened == 0) == (name in NEEDED)
    assert floor.line(name, found) in floor.PAGE.read_text(encoding="utf-8"), (
        "the page is out of date: python -m tests.environments.floor --write"
    )


def test_the_page_has_a_row_for_each_feature() -> None:
    table = floor.PAGE.read_text(encoding="utf-8").split(floor.BEGIN)[1].split(floor.END)[0]
    titles = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]]
    assert titles == [feature.title for feature in floor.FEATURES.values()]
