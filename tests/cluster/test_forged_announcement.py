"""A guest that can write to the announcement's sources gets neither token nor traffic."""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import pickle
import ssl
import time
import types
from typing import TYPE_CHECKING, Any

import pytest
from tests.remote.hostile import HostileServer

from union import sandbox as sb
from union.sandbox._wire.frames import VERSION
from union.sandbox.cluster import _find
from union.sandbox.cluster._announce import Announcement, announce, new_signing_key
from union.sandbox.cluster._find import Search
from union.sandbox.cluster._keys import Keys, verifier_of
from union.sandbox.server._tls import _load, _self_signed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.threat(158), pytest.mark.spec("I4", "I5"), pytest.mark.timeout(60)]
RUN = "sbx-forged"


class Plane:
    """A run that is running; its log and its object are lists of lines that a test writes."""

    def __init__(self, place: Path) -> None:
        self.keys = Keys()
        self.signing_key, self.verifier = new_signing_key()
        self.place = place / RUN
        self.log: list[str] = []
        self.run = types.SimpleNamespace(name=RUN, url="", action=None)

    def search(self, key: str) -> Search:
        search = Search(self.run, key=key, announce_to=str(self.place))
        search._running_since = time.monotonic() - 3600

        async def watch() -> None:
            await asyncio.sleep(3600)

        async def in_log() -> Any:
            while True:
                await asyncio.sleep(0.05)
                if (found := search._parse_log("\n".join(self.log))) is not None:
                    return found

        search._watch, search._search_log = watch, in_log  # type: ignore[method-assign]
        return search

    # The handle of an owner.

    async def wait_ready(self) -> Any:
        search = self.search(self.verifier)
        try:
            return await search.find(within_s=4)
        finally:
            await search.close()

    def take_socket(self) -> None:
        return None

    async def end(self) -> None:
        pass


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plane:
    monkeypatch.setattr(_find, "_SLOW_POLL_S", 0.1)
    monkeypatch.setattr(_find, "_LOG_WAIT_S", 0.1)
    return Plane(tmp_path)


@pytest.fixture
async def owner(plane: Plane) -> AsyncIterator[sb.SandboxSession]:
    now = dt.datetime.now(dt.UTC)
    session = sb.SandboxSession(
        name=RUN,
        created_at=now,
        expires_at=now + dt.timedelta(hours=1),
        verifier=plane.verifier,
    )
    session._become_owner(plane)
    yield session
    await session.close()


class Forger(HostileServer):
    """A server with its own certificate, which records every token that it receives."""

    def __init__(self) -> None:
        certificate, key = _self_signed()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _load(context, certificate + key)
        super().__init__(tls=context)
        der = ssl.PEM_cert_to_DER_cert(certificate)
        self.fingerprint = hashlib.sha256(der).hexdigest()

    def line(self, key: str, *, fingerprint: str = "") -> str:
        endpoint = f"{self.endpoint}#sha256={fingerprint or self.fingerprint}"
        expires = time.time() + 600
        payload = Announcement(run=RUN, endpoint=endpoint, protocol=VERSION, expires=expires)
        return announce(payload, key=key)


async def used(session: sb.SandboxSession) -> BaseException | None:
    try:
        await asyncio.wait_for(session.put_bytes("secret.txt", b"of the owner"), 30)
    except (sb.SandboxError, TimeoutError) as exc:
        return exc
    return None


async def test_the_attack_works_with_the_signing_key(plane: Plane, owner: sb.SandboxSession):
    """Positive control: an accepted line makes the owner send its token to the named address."""
    async with Forger() as forger:
        plane.place.write_text(forger.line(plane.signing_key))
        assert await used(owner) is None
        assert set(forger.tokens) == {plane.keys.owner}
        await owner.close()


@pytest.mark.parametrize("where", ["object", "log"])
async def test_no_value_of_a_reference_can_sign_a_line(
    plane: Plane, owner: sb.SandboxSession, where: str
):
    reference = pickle.loads(pickle.dumps(owner))
    texts = [value for value in vars(reference).values() if isinstance(value, str) and value]
    assert plane.signing_key not in repr(vars(reference))
    assert plane.keys.owner not in repr(vars(reference))
    guesses = {verifier_of(text) for text in texts}
    guesses |= {reference.verifier, verifier_of(plane.keys.owner), verifier_of(plane.keys.guest)}
    async with Forger() as forger:
        lines = [forger.line(guess) for guess in guesses]
        if where == "log":
            plane.log += lines
        else:
            plane.place.write_text("\n".join(lines))
        failed = await used(owner)
        assert isinstance(failed, sb.SandboxError)
        assert failed.code == "not-ready"
        assert (forger.requests, forger.tokens) == ({}, [])


async def test_other_guests_ignore_a_forged_line(plane: Plane, owner: sb.SandboxSession):
    """A receiver that gets the session before it is ready searches for the server itself."""
    reference = pickle.loads(pickle.dumps(owner))
    async with Forger() as forger:
        plane.place.write_text(forger.line(reference.verifier))
        search = plane.search(reference.verifier)
        with pytest.raises(sb.SandboxExecutionError):
            await search.find(within_s=1)
        await search.close()
        assert forger.tokens == []


async def test_a_signed_line_with_another_certificate_gets_no_token(
    plane: Plane, owner: sb.SandboxSession
):
    """A server at the announced address must prove that it is the one announced."""
    async with Forger() as forger:
        plane.log.append(forger.line(plane.signing_key, fingerprint="0" * 64))
        failed = await used(owner)
        assert isinstance(failed, sb.SandboxError)
        assert failed.code == "certificate"
        assert (forger.requests, forger.tokens) == ({}, [])


async def test_the_log_wins_over_the_object(plane: Plane, monkeypatch: pytest.MonkeyPatch):
    """Others may write the object, so it is not read until the server had time to log."""
    async with Forger() as real, Forger() as forger:
        plane.place.write_text(forger.line(plane.signing_key))
        search = plane.search(plane.verifier)
        search._running_since = time.monotonic()
        asyncio.get_running_loop().call_later(1.0, plane.log.append, real.line(plane.signing_key))
        found = await search.find(within_s=20)
        await search.close()
        assert found.endpoint.startswith(real.endpoint)
        search = plane.search(plane.verifier)
        search._running_since = None
        plane.log.clear()
        with pytest.raises(sb.SandboxExecutionError):
            await search.find(within_s=1)
        await search.close()


async def test_an_endless_object_is_read_up_to_its_limit(plane: Plane):
    plane.place.write_bytes(b"x" * (16 * 1024 * 1024))
    search = plane.search(plane.verifier)
    with pytest.raises(sb.SandboxExecutionError):
        await search.find(within_s=1)
    await search.close()
