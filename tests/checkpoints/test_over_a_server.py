"""Checkpoints over a server: rights, limits, dropped connections, and what its peers may send."""

from __future__ import annotations

import asyncio
import json
import tarfile
from io import BytesIO
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import eventually
from tests.remote.conftest import Proxy, remote, work_dirs_of
from tests.servers import ServerProcess

from union import sandbox as sb
from union.sandbox._checkpoints.values import TreeChange
from union.sandbox._checkpoints.wire import (
    decode_changes,
    decode_checkpoint,
    decode_checkpoints,
    encode_changes,
)
from union.sandbox._wire.errors import decode_error, encode_error
from union.sandbox._wire.frames import WireError, to_json
from union.sandbox.errors import SandboxBusyError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

MIB = 2**20
LIMIT = 4


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    options = ("--grace", "5", "--max-snapshots", str(LIMIT), "--max-snapshot-mib", "8")
    with ServerProcess("--backend", "userns", "--backend", "none", *options) as started:
        yield started


@pytest.fixture
async def session(server: ServerProcess) -> AsyncIterator[sb.Session]:
    async with remote(server, lazy=False) as opened:
        yield opened


def ask(
    server: ServerProcess, method: str, path: str, payload: object = None, token: str | None = None
) -> tuple[int, dict[str, Any]]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    body = None if payload is None else json.dumps(payload).encode()
    status, reply = server.request(method, f"/v1/sessions/{path}", body, **headers)
    return status, json.loads(reply) if reply[:1] == b"{" else {}


KEY = "ab" * 16


# Rights.


@pytest.mark.spec("L4", "I4")
async def test_checkpoints_are_a_right_of_their_own(
    server: ServerProcess, session: sb.Session
) -> None:
    await session.put_bytes("a", b"1")
    kept = await session.checkpoint("kept")
    path = f"{session.id}/capability"
    plain = ask(server, "POST", path, {})[1]["token"]
    allowed = ask(server, "POST", path, {"checkpoints": True})[1]["token"]
    assert ask(server, "POST", path, {"checkpoints": "yes"})[0] == 400
    calls: tuple[tuple[str, str, dict[str, str] | None], ...] = (
        ("POST", "take", {"key": KEY, "name": ""}),
        ("POST", "rollback", {"key": KEY, "checkpoint": kept.id}),
        ("POST", "drop", {"key": KEY, "checkpoint": kept.id}),
        ("POST", "adopt", {"key": KEY, "session": session.id}),
        ("POST", "list", {}),
        ("GET", f"diff?checkpoint={kept.id}", None),
        ("GET", f"export?checkpoint={kept.id}", None),
        ("PUT", "import", {}),
    )
    for method, action, payload in calls:
        status, reply = ask(server, method, f"{session.id}/checkpoints/{action}", payload, plain)
        assert (status, reply["error"]["code"]) == (403, "checkpoints-not-permitted"), action
    assert [one.name for one in await session.checkpoints()] == ["kept"]
    # With the right: everything in its own session, and nothing in others.
    async with sb.remote.attach(session.id, endpoint=server.endpoint, token=allowed) as guest:
        await guest.put_bytes("a", b"2")
        assert [change.path for change in await guest.diff(kept.id)] == ["a"]
        await guest.rollback(kept.id)
        taken = await guest.checkpoint("of the guest")
        assert await session.get_bytes("a") == b"1"
        with pytest.raises(sb.PolicyError):
            await taken.fork().open()
        async with remote(server, lazy=False) as other:
            with pytest.raises(sb.PolicyError):
                await guest.adopt(other)
            theirs = sb.remote.attach(other.id, endpoint=server.endpoint, token=allowed)
            async with theirs:
                with pytest.raises(sb.PolicyError):
                    await theirs.checkpoint()
    assert [one.name for one in await session.checkpoints()] == ["kept", "of the guest"]


# Limits.


@pytest.mark.spec("L4")
async def test_number_and_size_are_limited(session: sb.Session, tmp_path: Path) -> None:
    for number in range(LIMIT):
        await session.checkpoint(str(number))
    for call in (session.checkpoint, session.checkpoint):
        with pytest.raises(sb.SandboxUsageError, match=f"the limit is {LIMIT}") as error:
            await call()
        assert error.value.code == "checkpoint-limit"
    first, second, *_ = await session.checkpoints()
    await first.drop()
    await second.drop()
    await session.exec("head -c 3M /dev/urandom > a", check=True)
    kept = await session.checkpoint("small")
    # Each of the next states is small enough, and all of them together are not.
    await session.exec("head -c 6M /dev/urandom > a", check=True)
    with pytest.raises(sb.SandboxUsageError, match="would take") as error:
        await session.checkpoint("large")
    assert error.value.code == "checkpoint-limit"
    await session.rollback(kept)
    assert (await session.stat("a")).size == 3 * MIB
    content = BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        item = tarfile.TarInfo("large")
        item.size = 12 * MIB
        archive.addfile(item, BytesIO(bytes(12 * MIB)))
    (tmp_path / "large.tar").write_bytes(content.getvalue())
    with pytest.raises(sb.SandboxUsageError, match="more than") as error:
        await session.import_checkpoint(tmp_path / "large.tar")
    assert error.value.code == "checkpoint-limit"
    assert len(await session.checkpoints()) == LIMIT - 1


@pytest.mark.spec("L4")
async def test_a_fork_counts_as_a_session(server: ServerProcess, session: sb.Session) -> None:
    kept = await session.checkpoint()
    before = server.metric("sandbox_sessions")
    forks = await kept.fork_many(3)
    try:
        assert server.metric("sandbox_sessions") == before + 3
        assert len({one.id for one in (session, *forks)}) == 4
        async with sb.remote.attach(
            forks[0].id, endpoint=server.endpoint, token=server.token
        ) as same:
            await same.put_bytes("from", b"there")
        assert await forks[0].get_bytes("from") == b"there"
    finally:
        await asyncio.gather(*(one.close() for one in forks))
    await kept.drop()
    with pytest.raises(sb.SandboxUsageError) as error:
        await kept.fork().open()
    assert error.value.code == "no-such-checkpoint"


@pytest.mark.spec("L5")
async def test_a_disk_limit_holds_for_each_session(server: ServerProcess) -> None:
    limit = sb.Resources(disk="16Mi")
    async with (
        remote(server, resources=limit, lazy=False) as one,
        remote(server, resources=limit, lazy=False) as other,
    ):
        for each in (one, other):
            assert dict(each.isolation.limits)["disk"] == "tmpfs"
            full = await each.exec("head -c 64M /dev/zero > large; stat -c %s large")
            assert "No space left on device" in full.stderr
            # The other session's files do not count.
            assert 15 * MIB < int(full.stdout) <= 17 * MIB


# Dropped connections.


@pytest.mark.spec("L4", "I2")
async def test_a_checkpoint_is_not_taken_twice(server: ServerProcess) -> None:
    """The connection drops after the call was sent: it is sent again, and performed once."""
    async with Proxy(server) as proxy, remote(server, endpoint=proxy.endpoint, lazy=False) as kept:
        await kept.put_bytes("a", b"1")
        for number in range(3):
            taking = asyncio.create_task(kept.checkpoint(f"n{number}"))
            while not taking.done():
                await asyncio.sleep(0.004)
                proxy.cut()
                if proxy.cuts > 40 * (number + 1):
                    break
            await taking
        assert [one.name for one in await kept.checkpoints()] == ["n0", "n1", "n2"]
        assert proxy.cuts > 0


@pytest.mark.spec("L4")
async def test_the_same_key_has_the_same_outcome(
    server: ServerProcess, session: sb.Session
) -> None:
    path = f"{session.id}/checkpoints"
    first = ask(server, "POST", f"{path}/take", {"key": KEY, "name": "once"})
    assert first[0] == 200
    assert ask(server, "POST", f"{path}/take", {"key": KEY, "name": "once"}) == first
    drop = {"key": KEY, "checkpoint": first[1]["id"]}
    assert ask(server, "POST", f"{path}/drop", drop)[0] == 200
    assert ask(server, "POST", f"{path}/drop", drop)[0] == 200
    assert ask(server, "POST", f"{path}/drop", {**drop, "key": "cd" * 16})[0] == 404
    assert await session.checkpoints() == ()


@pytest.mark.spec("L4")
async def test_layers_end_with_the_session(server: ServerProcess) -> None:
    async with remote(server, lazy=False) as parent:
        await parent.put_bytes("a", b"1")
        kept = await parent.checkpoint()
        fork = await kept.fork().open()
        await parent.checkpoint()
        assert len(work_dirs_of(server)) > 2
    try:
        assert await fork.get_bytes("a") == b"1"
    finally:
        await fork.close()
    assert await asyncio.to_thread(eventually, lambda: not work_dirs_of(server))


# Hostile peers.


@pytest.mark.spec("I4")
async def test_malformed_calls_are_refused(server: ServerProcess, session: sb.Session) -> None:
    path = f"{session.id}/checkpoints"
    for action, payload in (
        ("take", {"name": "x"}),
        ("take", {"key": "short", "name": "x"}),
        ("take", {"key": KEY, "name": 5}),
        ("take", {"key": KEY, "name": "a\nb"}),
        ("take", {"key": KEY, "name": "x", "more": "y"}),
        ("rollback", {"key": KEY}),
        ("list", {"key": KEY}),
        ("adopt", {"key": KEY, "session": session.id}),
    ):
        status, reply = ask(server, "POST", f"{path}/{action}", payload)
        assert status == 400, (action, payload, reply)
    fork: object
    for fork in ([], {}, {"session": session.id}, {"session": 1, "checkpoint": "x"}):
        assert ask(server, "PUT", "ef" * 16, {"fork": fork})[0] == 400
    fork = {"session": session.id, "checkpoint": "0" * 16}
    assert ask(server, "PUT", "ef" * 16, {"fork": fork, "strict": True})[0] == 400
    assert ask(server, "PUT", "ef" * 16, {"fork": fork})[0] == 404
    assert ask(server, "GET", f"{path}/diff")[0] == 400
    assert ask(server, "GET", f"{path}/diff?checkpoint=..%2f..")[0] == 404
    assert await session.checkpoints() == ()


GOOD = {"id": "ab", "name": "n", "created": 1.0, "kind": "overlay", "took_s": 0.1}
CHANGE = {"path": "a", "action": "added", "kind": "file", "size": 1, "mode": 0o644}


@pytest.mark.spec("I4")
def test_a_hostile_server_is_refused() -> None:
    assert decode_checkpoint(GOOD).name == "n"
    for wrong in (
        {"id": "../x"}, {"id": 5}, {"name": "\x1b[2J"}, {"name": "x" * 201}, {"created": "now"},
        {"created": float("nan")}, {"kind": "floppy"}, {"size_bytes": -1}, {"took_s": True},
    ):  # fmt: skip
        with pytest.raises(WireError):
            decode_checkpoint({**GOOD, **wrong})
    for payload in ({}, {"checkpoints": [GOOD] * 1001}, {"checkpoints": "none"}):
        with pytest.raises(WireError):
            decode_checkpoints(payload)
    assert decode_changes(to_json({"changes": [CHANGE]}), already=0)[0].path == "a"
    for wrong in (
        {"path": "/etc/passwd"}, {"path": "../x"}, {"path": ""}, {"path": "a\0"}, {"path": 1},
        {"action": "moved"}, {"kind": "socket"}, {"size": -1}, {"mode": 2**20}, {"text": 5},
        {"old_size": "x"}, {"unknown": 1}, {"text": "x" * (4 * MIB + 1)},
    ):  # fmt: skip
        with pytest.raises(WireError):
            decode_changes(to_json({"changes": [{**CHANGE, **wrong}]}), already=0)
    with pytest.raises(WireError):
        decode_changes(to_json({"changes": [CHANGE]}), already=200_000)


@pytest.mark.spec("L1")
def test_changes_and_errors_on_the_wire_are_the_same_again() -> None:
    change = TreeChange(
        path="d/\udcff", action="changed", kind="file", size=3, mode=0o600, old_kind="symlink",
        old_size=1, old_mode=0o777, text="-a\n+b\n",
    )  # fmt: skip
    many = [change] * 5000
    pieces = list(encode_changes(many))
    assert len(pieces) > 3
    assert max(map(len, pieces)) < MIB
    found: list[TreeChange] = []
    for piece in pieces:
        found += decode_changes(piece, already=len(found))
    assert found == many
    busy = decode_error(encode_error(SandboxBusyError(3, ("a", "b/c"))))
    assert isinstance(busy, SandboxBusyError)
    assert (busy.running, busy.files, busy.code) == (3, ("a", "b/c"), "session-busy")
    hostile = {"type": "SandboxBusyError", "running": "x", "files": [1, {}, "f" * 9000]}
    assert decode_error(hostile).files == ("f" * 8192,)  # type: ignore[attr-defined]
