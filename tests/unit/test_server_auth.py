"""Tokens and capabilities: what is accepted, and the grants that result."""

from __future__ import annotations

import base64
import hashlib
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from union.sandbox.errors import SandboxUsageError
from union.sandbox.server._auth import Authority, Grant, Verifier

TOKEN = "correct horse battery staple"
SESSION = "ab" * 16


@pytest.mark.threat(115)
@pytest.mark.spec("I1")
def test_only_the_token_is_accepted():
    authority = Authority(Verifier.from_token(TOKEN))
    assert authority.authenticate(f"Bearer {TOKEN}") == Grant()
    assert authority.authenticate(f"bearer  {TOKEN} ") == Grant()
    for wrong in (None, "", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x"):
        assert authority.authenticate(wrong) is None
    assert TOKEN not in repr(vars(authority)) + repr(vars(authority._verifier))


def test_the_digest_of_a_token_is_sufficient():
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    verifier = Verifier.from_digest(digest, argument="x")
    assert verifier.accepts(TOKEN)
    assert not verifier.accepts(digest)
    for wrong in ("", "zz" * 32, digest[:-2]):
        with pytest.raises(SandboxUsageError):
            Verifier.from_digest(wrong, argument="x")


def test_a_capability_is_for_one_session_and_expires():
    authority = Authority(Verifier.from_token(TOKEN))
    made = authority.make_capability(SESSION, lifetime_s=60)
    grant = authority.authenticate(f"Bearer {made}")
    assert grant == Grant(SESSION)
    assert not grant.is_full
    assert grant.covers(SESSION)
    assert not grant.covers("cd" * 16)
    assert (
        authority.authenticate(f"Bearer {authority.make_capability(SESSION, lifetime_s=-1)}")
        is None
    )
    # Another server refuses it, even with the same token.
    assert Authority(Verifier.from_token(TOKEN)).authenticate(f"Bearer {made}") is None
    assert Authority(None).authenticate(f"Bearer {made}") is None


@pytest.mark.threat(115)
def test_a_modified_capability_is_refused():
    authority = Authority(Verifier.from_token(TOKEN))
    body, code = authority.make_capability(SESSION, lifetime_s=60)[5:].split(".")
    claims = json.loads(base64.urlsafe_b64decode(body))
    for changed in (["cd" * 16, claims[1]], [claims[0], time.time() + 9999], [None, claims[1]]):
        other = base64.urlsafe_b64encode(json.dumps(changed).encode()).decode()
        assert authority.authenticate(f"Bearer cap1.{other}.{code}") is None


@given(st.text(max_size=80))
def test_arbitrary_text_is_refused(text):
    authority = Authority(Verifier.from_token(TOKEN))
    assert authority.authenticate(text) is None
    assert authority.authenticate(f"Bearer {text}") is None
    assert authority.authenticate(f"Bearer cap1.{text}") is None
