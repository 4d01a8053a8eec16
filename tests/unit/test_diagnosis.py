"""The verdict of ``doctor()`` and its text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from union.sandbox._core.diagnosis import Attack, BackendReport, DoctorReport, Layer
from union.sandbox._core.isolation import Isolation


def attack(outcome: Any) -> Attack:
    return Attack(name="files", tried="read a file", outcome=outcome, detail="9 bytes")


def report(*backends: BackendReport, layers: tuple[Layer, ...] = ()) -> DoctorReport:
    return DoctorReport(
        version="1",
        python="3",
        system="Linux 6",
        machine="x86_64",
        uid=7,
        default="one",
        backends=backends,
        layers=layers,
    )


def works(name: str, *outcomes: Any) -> BackendReport:
    return BackendReport(
        name=name,
        available=True,
        isolation=Isolation(backend=name),
        attacks=tuple(attack(outcome) for outcome in outcomes),
    )


MISSING = BackendReport(name="one", available=False, reason="no such thing", hint="install it")


@pytest.mark.spec("G5")
def test_well_is_when_the_default_works_and_nothing_got_through() -> None:
    assert report(works("one", "held", "weaker")).ok
    assert not report(works("one", "held", "failed")).ok
    assert not report(works("one", "held"), works("two", "failed")).ok
    assert not report(MISSING, works("two", "held")).ok
    assert not report().ok
    # An unavailable backend that is not the default does not matter.
    assert report(works("one"), BackendReport(name="two", available=False, reason="r", hint="h")).ok


@pytest.mark.spec("G5")
def test_the_text_says_why_and_what_to_do() -> None:
    layer = Layer(name="landlock", available=False, detail="old kernel", hint="a newer one")
    text = str(report(MISSING, works("two", "weaker"), layers=(layer,)))
    assert "one *            no: no such thing\n                   fix: install it\n" in text
    assert "weaker: files: read a file: 9 bytes" in text
    assert "landlock         no: old kernel\n                   fix: a newer one" in text
    assert text.endswith("does not work on this machine. Available instead: backend='two'.")
    assert "NOT SAFE: escape checks failed with two." in str(report(works("two", "failed")))
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.spec("G5")
def test_the_report_is_ready_for_json() -> None:
    found = report(MISSING, works("two", "held"))
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["ok"] is False
    assert plain["backends"][0]["isolation"] is None
    assert plain["backends"][1]["isolation"]["backend"] == "two"
    assert plain["backends"][1]["attacks"] == [
        {"name": "files", "tried": "read a file", "outcome": "held", "detail": "9 bytes"}
    ]
