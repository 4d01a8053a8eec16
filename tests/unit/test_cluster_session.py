"""SandboxSession as a value: which fields are passed on by copy, pickle and Flyte."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from datetime import UTC, datetime, timedelta

import pytest

from union import sandbox as sb
from union.sandbox.cluster._keys import Keys
from union.sandbox.cluster._server_handle import ServerAddress

NOW = datetime.now(UTC)


class ServerHandle:
    def __init__(self) -> None:
        self.keys = Keys()
        self.ended = 0

    async def wait_ready(self) -> ServerAddress:
        return ServerAddress(endpoint="https://10.0.0.9:8372#sha256=" + "ab" * 32, ip="10.0.0.9")

    async def end(self) -> None:
        self.ended += 1


def made(**changes: object) -> sb.SandboxSession:
    fields = {
        "name": "sbx-0123456789abcdef",
        "created_at": NOW,
        "expires_at": NOW + timedelta(hours=1),
        "url": "https://console/run",
        "network_mode": "allowlist",
        "network_allowlist": ["example.com"],
        "network_denylist": ["10.0.0.0/8"],
        "access": "guest",
        "verifier": "cd" * 32,
    }
    return sb.SandboxSession(**{**fields, **changes})


def fields_of(session: sb.SandboxSession) -> dict[str, object]:
    return {field.name: getattr(session, field.name) for field in dataclasses.fields(session)}


def through_flyte(session: sb.SandboxSession) -> sb.SandboxSession:
    import asyncio

    from flyte.types import TypeEngine

    async def both_ways() -> sb.SandboxSession:
        kind = TypeEngine.to_literal_type(sb.SandboxSession)
        literal = await TypeEngine.to_literal(session, sb.SandboxSession, kind)
        return await TypeEngine.to_python_value(literal, sb.SandboxSession)

    return asyncio.run(both_ways())


WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda session: pickle.loads(pickle.dumps(session)),
    "flyte": through_flyte,
}


@pytest.mark.spec("I5")
@pytest.mark.parametrize("way", WAYS)
def test_the_receiver_gets_a_reference_with_the_same_fields(way):
    owner = made()
    handle = ServerHandle()
    owner._become_owner(handle)
    assert owner.is_owner
    arrived = WAYS[way](owner)
    assert type(arrived) is sb.SandboxSession
    assert not arrived.is_owner
    assert fields_of(arrived) == fields_of(owner)
    assert arrived.access == handle.keys.guest
    assert arrived.backend == "userns"
    assert arrived.work_dir == "/tmp/sandbox-work"


@pytest.mark.spec("I5")
def test_the_owners_token_is_never_passed_or_shown():
    owner = made()
    handle = ServerHandle()
    owner._become_owner(handle)
    assert handle.keys.owner.encode() not in pickle.dumps(owner)
    assert handle.keys.owner not in repr(owner) + repr(fields_of(owner))
    assert handle.keys.guest not in repr(owner)


@pytest.mark.spec("I5")
def test_a_receiver_of_another_version_ignores_unknown_fields():
    import asyncio

    import msgpack
    from flyte.types import TypeEngine
    from flyteidl2.core import literals_pb2

    async def read(payload: dict[str, object]) -> sb.SandboxSession:
        literal = literals_pb2.Literal(
            scalar=literals_pb2.Scalar(
                binary=literals_pb2.Binary(value=msgpack.dumps(payload), tag="msgpack")
            )
        )
        return await TypeEngine.to_python_value(literal, sb.SandboxSession)

    payload = {
        "name": "n",
        "created_at": NOW.isoformat(),
        "expires_at": NOW.isoformat(),
        "of_a_later_version": 1,
    }
    assert asyncio.run(read(payload)).name == "n"


def test_the_session_overrides_no_method_of_its_base():
    """Only its lifecycle differs, which is a part of it."""
    about_the_object = {"__doc__", "__init__", "__module__", "__repr__"}
    inherited = {name for base in (sb.Session, *sb.Session.__bases__) for name in vars(base)}
    assert {"open", "close", "run", "work_dir", "__await__", "__aenter__"} <= inherited
    # Python 3.13 and 3.14 add attributes of their own to every class.
    of_python = {"__annotations__", "__annotate_func__", "__firstlineno__", "__static_attributes__"}
    assert set(vars(sb.SandboxSession)) & inherited <= about_the_object | of_python


@pytest.mark.spec("I4")
async def test_waiting_sets_the_endpoint():
    owner = made()
    owner._become_owner(ServerHandle())
    assert (owner.endpoint, owner.ip) == ("", None)
    assert await owner is owner
    assert owner.ip == "10.0.0.9"
    assert owner.endpoint.startswith("https://10.0.0.9:8372#")


@pytest.mark.spec("I4")
async def test_repeated_closes_end_the_run_once():
    owner, handle = made(), ServerHandle()
    owner._become_owner(handle)
    async with owner:
        pass
    await owner.close()
    await owner.close()
    assert handle.ended == 1
    with pytest.raises(sb.SessionClosedError):
        await owner.exec("true")
    with pytest.raises(sb.SessionClosedError):
        await owner


async def test_facts_of_the_server_are_available_once_it_is_connected():
    session = made(host_work_dir="/data")
    assert session.work_dir == "/data"
    assert session.backend == "userns"
    with pytest.raises(sb.SessionClosedError) as caught:
        _ = session.isolation
    assert caught.value.hint == "make a call first"
    await session.close()


async def test_an_expired_session_reports_its_timeout():
    late = made(expires_at=NOW - timedelta(seconds=1), endpoint="unix:///nowhere")
    with pytest.raises(sb.SessionClosedError, match="timeout has passed"):
        await late.exec("true")


async def test_a_reference_without_an_endpoint_is_an_error():
    lost = made(endpoint="")
    with pytest.raises(sb.SandboxUsageError, match="has no endpoint yet") as caught:
        await lost.exec("true")
    assert caught.value.code == "no-endpoint"
    await lost.close()


def test_importing_the_session_does_not_import_flyte():
    import subprocess
    import sys

    code = (
        "import sys\nfrom union import sandbox as sb\nsb.SandboxSession, sb.session\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'flyte', 'kubernetes'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


async def test_the_error_of_an_unreachable_pod_explains_from_where_it_can_be_reached(monkeypatch):
    monkeypatch.setattr("union.sandbox.cluster._lifecycle._CONNECT_S", 0.1)
    # No process listens on the discard port of this machine.
    outside = made(endpoint="https://127.0.0.1:9#sha256=" + "ab" * 32)
    with pytest.raises(sb.errors.SandboxConnectionError) as caught:
        await outside.exec("true")
    assert "from pods of its cluster" in caught.value.hint
    await outside.close()
