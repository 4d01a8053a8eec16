"""Announcements: only lines that the server of a run signed are accepted."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from union.sandbox.cluster._announce import (
    PREFIX,
    Announcement,
    announce,
    new_signing_key,
    parse_announcement,
)
from union.sandbox.cluster._keys import Keys, session_name, verifier_of

KEY, PUBLIC = new_signing_key()
RUN = "sbx-0123456789abcdef"
ANNOUNCED = Announcement(
    run=RUN, endpoint=f"https://10.0.0.7:8372#sha256={'ab' * 32}", protocol=1, expires=1000.0
)


def parsed(
    line: str, *, key: str = PUBLIC, run: str = RUN, now: float = 10.0
) -> Announcement | None:
    return parse_announcement(line, key=key, run=run, now=now)


@pytest.mark.spec("I4")
def test_an_announcement_is_found_anywhere_in_a_line():
    line = announce(ANNOUNCED, key=KEY)
    assert "\n" not in line
    assert parsed(line) == ANNOUNCED
    assert parsed(f"2026-01-01T00:00:00Z stdout F {line}\n") == ANNOUNCED


def test_a_failure_is_announced_too():
    failed = Announcement(run=RUN, protocol=1, expires=1000.0, failed={"message": "no userns"})
    assert parsed(announce(failed, key=KEY)) == failed


def test_a_line_of_another_run_or_another_key_or_an_old_one_is_refused():
    line = announce(ANNOUNCED, key=KEY)
    assert parsed(line, run="sbx-fedcba9876543210") is None
    assert parsed(line, key=new_signing_key()[1]) is None
    assert parsed(line, now=1000.0) is None


@pytest.mark.parametrize(
    "change",
    [
        {"endpoint": "https://10.0.0.66:1#sha256=" + "cd" * 32},
        {"run": "sbx-fedcba9876543210"},
        {"expires": 9999.0},
        {"version": 1},
        {"more": 1},
    ],
)
def test_an_edited_line_is_refused(change):
    both = json.loads(announce(ANNOUNCED, key=KEY).removeprefix(PREFIX))
    both["payload"] = json.dumps(json.loads(both["payload"]) | change, separators=(",", ":"))
    assert parsed(PREFIX + json.dumps(both)) is None


@pytest.mark.threat(158)
def test_the_verifier_cannot_sign_a_line():
    """Every reference holds the public key; nothing that a guest has can sign."""
    assert parsed(announce(ANNOUNCED, key=KEY)) == ANNOUNCED, "the control"
    for guessed in (PUBLIC, verifier_of(PUBLIC), verifier_of("the owner's key")):
        assert parsed(announce(ANNOUNCED, key=guessed)) is None


@pytest.mark.threat(158)
@pytest.mark.parametrize(
    "endpoint",
    [
        "gopher://x",
        "http://10.0.0.7:8372",
        "http://127.0.0.1:1",
        "https://10.0.0.7:8372",
        "unix:///x",
    ],
)
def test_a_signed_line_without_a_certificate_is_refused(endpoint):
    line = announce(Announcement(run=RUN, endpoint=endpoint, protocol=1, expires=99), key=KEY)
    assert parsed(line) is None


@given(st.text(max_size=200))
def test_any_text_is_no_announcement(text):
    assert parsed(text) is None
    assert parsed(PREFIX + text) is None


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), st.lists, max_leaves=5))
def test_any_json_is_no_announcement(value):
    assert parsed(PREFIX + json.dumps(value)) is None
    assert parsed(PREFIX + json.dumps({"payload": value, "signature": "x"})) is None
    assert parsed(PREFIX + json.dumps({"payload": "{}", "signature": value})) is None


def test_a_line_reveals_no_key():
    keys = Keys()
    line = announce(ANNOUNCED, key=KEY)
    assert KEY not in line
    assert keys.owner not in repr(keys)
    assert keys.guest not in repr(keys)
    assert keys.owner != keys.guest


def test_the_name_of_a_session_follows_from_its_run():
    assert session_name(RUN) == session_name(RUN) != session_name("other")
    assert len(session_name(RUN)) == 32
