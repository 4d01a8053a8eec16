"""Quotas of sessions and keys: runs, bytes and frames."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from union.sandbox._core.spec import RunSpec, SessionSpec
from union.sandbox._wire import frames as wire
from union.sandbox._wire.frames import Kind, Offsets, WireError
from union.sandbox._wire.values import MAX_START, encode_run
from union.sandbox.errors import SandboxError, SandboxExecutionError
from union.sandbox.server import _quotas
from union.sandbox.server._auth import Grant
from union.sandbox.server._metrics import Metrics
from union.sandbox.server._quotas import Buffers, Charge, FrameBudgets, RequestBytes, RunSlots
from union.sandbox.server._run_table import KeptRuns, RunTable
from union.sandbox.server._runs import ServerRun
from union.sandbox.server._server_connection import ServerConnection

if TYPE_CHECKING:
    from collections.abc import Callable

OWNER, GUEST = Grant(), Grant("s", "guest")
MIB = 1024 * 1024


def acquired(slots: RunSlots, session: str, *, is_limited: bool = False) -> int:
    """Acquire slots until one is refused as ``busy``; return their number."""
    return until_busy(lambda: slots.acquire(session, is_limited=is_limited))


def until_busy(call: Callable[[], object]) -> int:
    """Return how often a call succeeds before it is refused."""
    done = 0

    def repeat() -> None:
        nonlocal done
        for _ in range(10_000):
            call()
            done += 1

    with pytest.raises(SandboxExecutionError) as caught:
        repeat()
    assert caught.value.code == "busy"
    return done


@pytest.mark.threat(168)
def test_every_session_has_guaranteed_slots():
    slots = RunSlots(256, sessions=64)
    assert acquired(slots, "greedy") == slots.per_session == 130
    for number in range(63):
        assert acquired(slots, f"other {number}") >= slots.guaranteed, number
    assert acquired(slots, "greedy") == 0, "all 256 are in use now"
    alone = RunSlots(256, sessions=1)
    assert acquired(alone, "only") == 256, "positive control: nothing is reserved"


@pytest.mark.threat(168)
def test_greedy_sessions_do_not_use_guaranteed_slots():
    slots = RunSlots(40, sessions=10)
    for number in range(9):
        acquired(slots, f"greedy {number}")
    assert acquired(slots, "last") >= slots.guaranteed


@pytest.mark.threat(168)
def test_limited_keys_use_at_most_half_of_the_slots():
    slots = RunSlots(100, sessions=1)
    assert acquired(slots, "s", is_limited=True) == 50
    assert acquired(slots, "s") == 50


@pytest.mark.threat(168)
def test_released_slots_can_be_acquired_again():
    slots = RunSlots(8, sessions=2)
    for _ in range(3):
        assert acquired(slots, "s") == 6
        assert acquired(slots, "t") == 2
        for session, count in (("s", 6), ("t", 2)):
            for _ in range(count):
                slots.release(session, is_limited=False)


@pytest.mark.parametrize("total, sessions", [(1, 64), (2, 64), (3, 2), (256, 1)])
def test_small_servers_have_at_least_one_slot(total: int, sessions: int):
    slots = RunSlots(total, sessions)
    assert acquired(slots, "s") >= 1
    assert RunSlots(total, sessions).per_session >= 1


@pytest.mark.threat(154)
def test_a_guest_cannot_use_the_memory_reserved_for_the_owner():
    requests = RequestBytes(256 * MIB, 64)
    session = requests.for_session()
    guests: list[Charge] = []

    def describe() -> None:
        guests.append(requests.charge(GUEST, session))
        guests[-1].grow(MAX_START)

    assert until_busy(describe) == 1, "one whole START is held, the second is refused"
    owner = requests.charge(OWNER, session)
    owner.grow(MAX_START)
    for charge in (*guests, owner):
        charge.release()
        charge.release()
    assert requests.all.held == session[0].held == session[1].held == 0


# Kept runs.


def table(*, max_runs: int = 8, max_buffer: int = 16 * MIB) -> RunTable:
    config = SimpleNamespace(max_runs=max_runs, max_sessions=4)
    owner: Any = SimpleNamespace(
        config=config, buffers=Buffers(max_buffer), slots=RunSlots(max_runs, 4)
    )
    return RunTable(owner, "s")


def kept_run(runs: RunTable, number: int, grant: Grant) -> ServerRun:
    run = ServerRun(number, RunSpec(kind="shell", text="x"), runs.buffers_of(grant), grant)
    runs.add(run)
    return run


@pytest.mark.threat(154, 168)
async def test_runs_of_a_guest_without_acknowledgements_do_not_block_the_owner():
    runs = table()

    def begin() -> None:
        runs.check_room(GUEST)
        kept_run(runs, len(runs), GUEST)

    assert until_busy(begin) == 8
    runs.check_room(OWNER)
    for run in tuple(runs.values()):
        runs.discard(run)
        runs.discard(run)
    runs.check_room(GUEST)


@pytest.mark.threat(154)
async def test_unread_output_of_a_guest_blocks_only_the_guest():
    runs = table(max_buffer=256 * MIB)
    runs.buffers_of(GUEST).add(64 * MIB)
    with pytest.raises(SandboxExecutionError, match="unread output"):
        runs.check_room(GUEST)
    runs.check_room(OWNER)


@pytest.mark.threat(154)
async def test_kept_runs_lose_their_output_but_stay_known():
    buffers = Buffers(1 << 30)
    kept = KeptRuns(1000, 700)
    runs = []
    for number in range(5):
        run = ServerRun(number, RunSpec(kind="shell", text="x"), buffers)
        run._early = None
        run.output(1, b"x" * 250)
        runs.append(run)
        kept.add(run, "s")
    assert [run.log.streams[1].acked for run in runs] == [250, 250, 250, 0, 0]
    assert buffers.held < 700
    with pytest.raises(WireError):
        runs[0].attach(SimpleNamespace(notify=lambda _: None), Offsets())  # type: ignore[arg-type]
    runs[4].release()
    runs[3].attach(SimpleNamespace(notify=lambda _: None), Offsets())  # type: ignore[arg-type]
    assert kept._held == 0
    assert not kept._of_session


# Frames.


@pytest.mark.threat(169)
def test_connections_of_one_key_share_a_frame_budget(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(_quotas.time, "monotonic", lambda: now[0])
    budgets = FrameBudgets()
    first, second = budgets.of("guest"), budgets.of("guest")
    assert first is second
    assert budgets.of("owner") is not first
    assert first.spend(50_000) == 0.0
    assert second.spend(50_000) == pytest.approx(1.0)
    now[0] += 2.0
    assert first.spend(1) == 0.0
    del first, second
    gc.collect()
    assert list(budgets._by_key) == [], "budgets of keys without a connection are removed"


class ScriptedStream:
    """A message stream with scripted messages; with ``reads=False`` its client does not read."""

    end = ""

    def __init__(self, messages: list[bytes], *, reads: bool = True) -> None:
        self._messages = messages
        self._reads = reads
        self.sent: list[bytes] = []
        self.why = ""

    async def __aiter__(self) -> Any:
        for message in self._messages:
            yield message
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def send(self, pieces: list[bytes]) -> bool:
        if not self._reads:
            await asyncio.get_running_loop().create_future()
        self.sent.append(b"".join(pieces))
        return True

    async def close(self, why: str = "") -> None:
        self.why = why


def connection_over(
    stream: ScriptedStream, grant: Grant = OWNER, runs: Any = None
) -> tuple[ServerConnection, Any]:
    requests = RequestBytes(0, 4)

    def never(*_: object, **__: object) -> Any:
        raise SandboxExecutionError("run limit reached", stage="transport", code="busy")

    session = SimpleNamespace(
        name="s" * 32,
        runs={} if runs is None else runs,
        bytes=requests.for_session(),
        listeners=set(),
        hold=lambda: None,
        release=lambda: None,
        detach=lambda *_: None,
        forget_if_complete=lambda *_: None,
        check_room=never,
    )
    sessions: Any = SimpleNamespace(metrics=Metrics(), bytes=requests, frames=FrameBudgets())
    made = ServerConnection(stream, session, sessions, grant=grant, is_private=True)  # type: ignore[arg-type]
    return made, sessions


def part(number: int, at: int, last: int, data: bytes) -> bytes:
    return wire.encode(Kind.START, number, wire._PART.pack(at, last) + data)


def refusals(stream: ScriptedStream) -> list[tuple[int, str]]:
    found = []
    for message in stream.sent:
        for frame in wire.decode(message):
            if frame.kind is Kind.EVENT:
                event = wire.parse_json(wire.decode_numbered(frame.payload)[1])
                found.append((frame.run, event["refused"]["code"]))
    return found


@pytest.mark.threat(154, 168)
async def test_a_busy_server_refuses_the_run_and_keeps_the_connection():
    spec = SessionSpec(backend="userns")
    body = encode_run(RunSpec(kind="shell", text="true"), spec)
    stream = ScriptedStream(
        [b"".join(frame for n in range(1, 4) for frame in wire.encode_start(n, body))]
    )
    connection, sessions = connection_over(stream)
    await connection.serve()
    assert refusals(stream) == [(1, "busy"), (2, "busy"), (3, "busy")]
    assert stream.why == ""
    assert sessions.bytes.all.held == 0


@pytest.mark.threat(154)
async def test_starts_over_the_budget_are_refused_and_their_late_parts_ignored():
    chunk = bytes(wire.MAX_CHUNK)
    count = MAX_START // wire.MAX_CHUNK
    messages = [part(1, n * len(chunk), 0, chunk) for n in range(count)]
    # The second START exceeds the quota of a guest; its later parts are not an error.
    messages += [part(2, n * len(chunk), 0, chunk) for n in range(3)]
    messages += [part(3, 0, 0, b"")]
    stream = ScriptedStream(messages)
    connection, sessions = connection_over(stream, GUEST)
    await connection.serve()
    assert refusals(stream) == [(2, "busy")]
    assert stream.why == ""
    assert sessions.bytes.all.held == 0, "the end of a connection releases its memory"


@pytest.mark.threat(154)
async def test_a_start_that_stops_arriving_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("union.sandbox.server._server_connection._PART_TIMEOUT_S", 0.01)
    held = []

    class Slow(ScriptedStream):
        async def __aiter__(self) -> Any:
            yield part(1, 0, 0, b"x" * 1000)
            held.append(sessions.bytes.all.held)
            async with asyncio.timeout(40):
                while not refusals(self):
                    await asyncio.sleep(0.01)
            held.append(sessions.bytes.all.held)

    stream = Slow([])
    connection, sessions = connection_over(stream)
    await connection.serve()
    assert refusals(stream) == [(1, "too-slow")]
    assert held == [1000, 0]


@pytest.mark.threat(154)
async def test_replies_for_a_client_that_does_not_read_are_bounded():
    attaches = [wire.encode_offsets(Kind.ATTACH, n, Offsets()) for n in range(20_000)]
    stream = ScriptedStream([b"".join(attaches)], reads=False)
    connection, sessions = connection_over(stream)
    await connection.serve()
    assert "does not read" in stream.why
    assert sessions.metrics.bad_frames == 1


@pytest.mark.threat(169)
@pytest.mark.parametrize(
    "frame",
    [wire.encode_offsets(Kind.ACK, 5, Offsets()), wire.encode(Kind.STDIN, 5), part(5, 0, 0, b"")],
    ids=["ack of nothing", "stdin of nothing", "empty part"],
)
async def test_a_message_of_many_frames_does_not_block_the_event_loop(frame: bytes):
    """Other tasks get a turn every 256 frames."""
    count = wire.MAX_MESSAGE // len(frame)
    turns = 0
    over = asyncio.Event()

    async def other() -> None:
        nonlocal turns
        while not over.is_set():
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.get_running_loop().create_task(other())
    connection, _ = connection_over(ScriptedStream([frame * count]))
    await connection.serve()
    over.set()
    await task
    assert turns >= count // 256


# A run belongs to the key that started it.


@pytest.mark.threat(165)
@pytest.mark.parametrize("kind", [Kind.ATTACH, Kind.ACK, Kind.STDIN, Kind.CONTROL])
async def test_a_run_of_another_key_is_unknown(kind: Kind):
    run = ServerRun(7, RunSpec(kind="shell", text="x"), Buffers(1 << 30), OWNER)
    run._early = None
    run.output(1, b"the secret")
    if kind in {Kind.STDIN, Kind.CONTROL}:
        frame = wire.encode_numbered(kind, 7, 1, b'{"op":"end","cause":"closed"}')
    else:
        frame = wire.encode_offsets(kind, 7, Offsets())
    for grant, is_own in ((GUEST, False), (OWNER, True)):
        stream = ScriptedStream([frame])
        connection, _ = connection_over(stream, grant, {7: run})
        await connection.serve()
        sent = b"".join(stream.sent)
        if kind is Kind.ATTACH:
            assert (b"the secret" in sent) is is_own, "the owner is the positive control"
            kinds = {found.kind for found in wire.decode(sent)}
            assert (Kind.UNKNOWN in kinds) is not is_own
        else:
            assert b"the secret" not in sent
            assert (run._received == 1) is (is_own and kind in {Kind.STDIN, Kind.CONTROL})
    run.release()


@pytest.mark.threat(154)
async def test_frames_for_a_run_that_has_not_started_are_bounded():
    run = ServerRun(1, RunSpec(kind="shell", text="x"), Buffers(1 << 30))
    signal = b'{"op":"signal","signum":10}'

    def send() -> None:
        for number in range(1, 10_000):
            payload = memoryview(wire._NUMBER.pack(number) + signal)
            run.handle_frame(wire.Frame(Kind.CONTROL, 1, payload))

    with pytest.raises(WireError, match="has not started"):
        send()
    run.release()


def test_a_used_up_quota_is_a_busy_error():
    error = _quotas.busy("no room")
    assert isinstance(error, SandboxError)
    assert error.code == "busy"
    assert error.hint
