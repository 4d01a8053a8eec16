"""Announcements: what the server of a run wrote is believed, and nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from union.sandbox.cluster._announce import PREFIX, Announcement, announce, heard
from union.sandbox.cluster._keys import Keys, session_name, verifier_of

KEY = verifier_of("the owner's key")
RUN = "sbx-0123456789abcdef"
TOLD = Announcement(
    run=RUN, endpoint=f"https://10.0.0.7:8372#sha256={'ab' * 32}", protocol=1, expires=1000.0
)


def ears(line: str, *, key: str = KEY, run: str = RUN, now: float = 10.0) -> Announcement | None:
    return heard(line, key=key, run=run, now=now)


@pytest.mark.spec("I4")
def test_what_was_announced_is_heard_wherever_it_stands_in_a_line():
    line = announce(TOLD, key=KEY)
    assert "\n" not in line
    assert ears(line) == TOLD
    assert ears(f"2026-01-01T00:00:00Z stdout F {line}\n") == TOLD


def test_a_failure_is_announced_too():
    failed = Announcement(run=RUN, protocol=1, expires=1000.0, failed={"message": "no userns"})
    assert ears(announce(failed, key=KEY)) == failed


def test_a_line_of_another_run_or_another_key_or_an_old_one_is_refused():
    line = announce(TOLD, key=KEY)
    assert ears(line, run="sbx-fedcba9876543210") is None
    assert ears(line, key=verifier_of("another")) is None
    assert ears(line, now=1000.0) is None


@pytest.mark.parametrize(
    "change",
    [
        {"endpoint": "http://10.0.0.66:1"},
        {"run": "sbx-fedcba9876543210"},
        {"expires": 9999.0},
        {"version": 2},
        {"more": 1},
    ],
)
def test_an_edited_line_is_refused(change):
    both = json.loads(announce(TOLD, key=KEY).removeprefix(PREFIX))
    both["told"] |= change
    assert ears(PREFIX + json.dumps(both)) is None


def test_an_endpoint_that_is_none_is_refused_although_it_is_signed():
    line = announce(Announcement(run=RUN, endpoint="gopher://x", protocol=1, expires=99), key=KEY)
    assert ears(line) is None


@given(st.text(max_size=200))
def test_any_text_is_no_announcement(text):
    assert ears(text) is None
    assert ears(PREFIX + text) is None


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), st.lists, max_leaves=5))
def test_any_json_is_no_announcement(value):
    assert ears(PREFIX + json.dumps(value)) is None
    assert ears(PREFIX + json.dumps({"told": value, "code": "x"})) is None
    assert ears(PREFIX + json.dumps({"told": {}, "code": value})) is None


def test_the_code_shows_nothing_of_the_keys():
    keys = Keys()
    line = announce(TOLD, key=verifier_of(keys.owner))
    assert keys.owner not in line
    assert verifier_of(keys.owner) not in line
    assert keys.owner not in repr(keys)
    assert keys.guest not in repr(keys)
    assert keys.owner != keys.guest


def test_the_name_of_a_session_follows_from_its_run():
    assert session_name(RUN) == session_name(RUN) != session_name("other")
    assert len(session_name(RUN)) == 32
