"""A run on the server, between the engine and a client that may disconnect."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from union.sandbox._core.events import Exited, Started, Usage
from union.sandbox._core.isolation import Isolation
from union.sandbox._core.spec import RunSpec
from union.sandbox._wire import frames as wire
from union.sandbox._wire.frames import WINDOW, Frame, Kind, Offsets, WireError
from union.sandbox.errors import SandboxUsageError
from union.sandbox.server._quotas import Buffers
from union.sandbox.server._runs import ServerRun

if TYPE_CHECKING:
    from collections.abc import Iterable

ISOLATION = Isolation(backend="scripted")


class Engine:
    """A transport with one run; the test controls its events."""

    isolation = ISOLATION

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.sink: ServerRun | None = None
        self.calls: list[tuple[object, ...]] = []
        self.error: Exception | None = None

    async def start(self, spec: RunSpec, sink: ServerRun) -> Engine:
        self.sink = sink
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return self

    def resume(self, fd: int) -> None:
        self.calls.append(("resume", fd))

    def signal(self, signum: int) -> None:
        self.calls.append(("signal", signum))

    def end(self, cause: str) -> None:
        self.calls.append(("end", cause))

    def resize(self, rows: int, cols: int) -> None:
        self.calls.append(("resize", rows, cols))

    def feed_stdin(self, data: bytes) -> None:
        self.calls.append(("stdin", data))

    async def drain_stdin(self) -> None:
        if ("broken",) in self.calls:
            raise BrokenPipeError

    def close_stdin(self) -> None:
        self.calls.append(("eof",))


class Client:
    """A listener that counts notifications."""

    def __init__(self) -> None:
        self.notified = 0

    def notify(self, run: ServerRun) -> None:
        self.notified += 1


def sent(run: ServerRun) -> list[Frame]:
    return decoded(run.frames(1 << 24))


def decoded(pieces: Iterable[bytes]) -> list[Frame]:
    """Return the frames that a client decodes, independent of message boundaries."""
    whole, frames = b"".join(pieces), []
    while whole:
        size = 13 + int.from_bytes(whole[9:13], "big")
        frames += wire.decode(whole[:size])
        whole = whole[size:]
    return frames


def control(number: int, **fields: object) -> Frame:
    (frame,) = wire.decode(wire.encode_numbered(Kind.CONTROL, 1, number, wire.to_json(fields)))
    return frame


async def started(run: ServerRun, engine: Engine) -> asyncio.Task[None]:
    task = asyncio.create_task(run.start(engine))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    return task


def new(**options: object) -> tuple[ServerRun, Engine, Buffers]:
    buffers = Buffers(1 << 30)
    spec = RunSpec(kind="shell", text="x", stdout="pipe", **options)  # type: ignore[arg-type]
    return ServerRun(1, spec, buffers), Engine(), buffers


@pytest.mark.spec("D6", "I3")
async def test_output_before_started_is_buffered_and_sent_after_it():
    run, engine, buffers = new()
    run.attach(Client(), None)
    task = await started(run, engine)
    run.event(Started(2))
    assert run.output(1, bytes(WINDOW - 1000))
    assert not run.output(1, bytes(2000)), "full: the engine must stop reading"
    assert sent(run) == [], "nothing before Started"
    assert not run.has_more
    engine.go.set()
    await task
    frames = sent(run)
    assert frames[0].kind is Kind.EVENT
    assert {frame.kind for frame in frames[1:]} == {Kind.OUTPUT}
    assert engine.calls == [], "still full"
    run.ack(Offsets(WINDOW, 0, 1))
    assert engine.calls == [("resume", 1)]
    assert 0 < buffers.held < 5000
    run.release()
    assert buffers.held == 0


async def test_controls_before_the_start_are_applied_after_it():
    run, engine, _ = new(stdin="pipe")
    task = await started(run, engine)
    run.handle_frame(control(1, op="signal", signum=15))
    run.handle_frame(control(2, op="resize", rows=3, cols=4))
    run.handle_frame(control(3, op="eof"))
    run.end("closed")
    assert engine.calls == []
    engine.go.set()
    await task
    assert engine.calls == [("signal", 15), ("resize", 3, 4), ("eof",), ("end", "closed")]
    run.handle_frame(control(3, op="signal", signum=9))
    assert len(engine.calls) == 4, "control 3 is a repetition"
    with pytest.raises(WireError, match="must be 4"):
        run.handle_frame(control(5, op="eof"))


async def test_a_refusal_is_the_only_event():
    run, engine, _ = new()
    engine.error = SandboxUsageError("cwd is wrong", argument="cwd")
    engine.go.set()
    await (await started(run, engine))
    kinds = [frame.kind for frame in sent(run)]
    assert kinds == [Kind.EVENT, Kind.END_OF_OUTPUT, Kind.END_OF_OUTPUT]
    assert run.over.done()
    run.ack(Offsets(0, 0, 1))
    assert run.log.is_over


async def test_an_internal_error_is_reported_and_raised():
    run, engine, _ = new()
    engine.error = ZeroDivisionError("a bug")
    engine.go.set()
    with pytest.raises(ZeroDivisionError):
        await (await started(run, engine))
    assert b"could not start" in bytes(sent(run)[0].payload)


@pytest.mark.spec("I3")
async def test_messages_are_bounded_and_the_streams_take_turns():
    run, engine, _ = new(stderr="pipe")
    engine.go.set()
    await (await started(run, engine))
    for fd in (1, 2):
        run.output(fd, bytes(WINDOW - 1))
    seen: set[int] = set()
    for _ in range(2):
        pieces = list(run.frames(256 * 1024))
        assert sum(map(len, pieces)) <= wire.MAX_MESSAGE // 2 + 1024
        seen |= {wire.decode_output(f.payload)[0] for f in decoded(pieces)}
    assert seen == {1, 2}


@pytest.mark.spec("I2")
async def test_a_client_that_reconnects_gets_the_missing_output():
    run, engine, _ = new()
    first, second = Client(), Client()
    run.attach(first, None)
    engine.go.set()
    await (await started(run, engine))
    run.event(Started(2))
    run.output(1, b"0123456789")
    assert len(sent(run)) == 2
    assert run.detach(first)
    run.output(1, b"abc")
    run.end_of_output(1)
    run.end_of_output(2)
    run.event(Exited(0, "", Usage()))
    run.attach(second, Offsets(4, 0, 1))
    assert second.notified
    assert not run.detach(first), "another listener is attached"
    frames = {frame.kind: bytes(frame.payload) for frame in sent(run)}
    assert frames[Kind.OUTPUT].endswith(b"abc")
    assert b"exited" in frames[Kind.EVENT]
    assert Kind.TAKEN in frames


async def test_stdin_progress_and_a_broken_pipe_are_reported():
    run, engine, _ = new(stdin="pipe")
    engine.go.set()
    await (await started(run, engine))
    (frame,) = wire.decode(wire.encode_numbered(Kind.STDIN, 1, 1, b"typed"))
    run.handle_frame(frame)
    await asyncio.sleep(0.01)
    taken = [wire.decode_taken(f.payload) for f in sent(run) if f.kind is Kind.TAKEN]
    assert taken[-1] == wire.Taken(1, 5, broken=False)
    engine.calls.append(("broken",))
    (frame,) = wire.decode(wire.encode_numbered(Kind.STDIN, 1, 2, b"more"))
    run.handle_frame(frame)
    await asyncio.sleep(0.01)
    taken = [wire.decode_taken(f.payload) for f in sent(run) if f.kind is Kind.TAKEN]
    assert taken[-1] == wire.Taken(2, 9, broken=True)
