"""Both ends of the wire between a remote session and its server, each with a hostile peer."""

from __future__ import annotations

import asyncio
import os
import socket
import types
from typing import Any

from union.sandbox._core.events import Exited, Failed, Started
from union.sandbox._core.isolation import Isolation
from union.sandbox._core.spec import RunSpec, SessionSpec
from union.sandbox._linux.prepared import Sandbox
from union.sandbox._linux.run import LocalRun
from union.sandbox._wire import frames as wire
from union.sandbox._wire import values as wire_values
from union.sandbox._wire.errors import decode_error, encode_error
from union.sandbox._wire.frames import Kind, Offsets, WireError, parse_json
from union.sandbox._wire.message_stream import SocketStream
from union.sandbox._wire.run_log import RunLog, StreamLog
from union.sandbox.errors import SandboxError, SandboxUsageError
from union.sandbox.remote._run import RemoteRun
from union.sandbox.server._auth import Authority, Grant, Guest, Verifier
from union.sandbox.server._metrics import Metrics
from union.sandbox.server._owner_socket import _authenticate
from union.sandbox.server._quotas import Buffers, ByteBudget, FrameBudgets, RequestBytes, busy
from union.sandbox.server._runs import ServerRun
from union.sandbox.server._server_connection import ServerConnection

SESSION = SessionSpec(backend="userns", env=(("A", "b"),))
ISOLATION = Isolation(backend="scripted")
BACKENDS = ("userns", "bubblewrap")
LOOP = asyncio.new_event_loop()
GUEST = Guest(verifier=Verifier.from_token("open sesame"), session="one", until=float("inf"))
AUTHORITY = Authority(Verifier(bytes(32)), GUEST)
NEXT_MESSAGE = b"\xff\xfe\xfd\xfc"
PATTERN = bytes(range(251)) * 6000


# Values.


def _session(payload: dict[str, Any]) -> None:
    spec = wire_values.decode_session(payload, backends=BACKENDS, default_backend="userns")
    again = wire.parse_json(wire.to_json(wire_values.encode_session(spec)))
    assert spec == wire_values.decode_session(again, backends=BACKENDS, default_backend="userns")


def _run(body: bytes) -> None:
    spec = wire_values.decode_run(body, SESSION)
    assert wire_values.decode_run(wire_values.encode_run(spec, SESSION), SESSION) == spec


def _event(data: bytes) -> None:
    name, value = wire_values.decode_event(data)
    if name in {"exited", "failed"}:
        assert wire_values.decode_event(wire_values.encode_event(value)) == (name, value)
    elif name == "decision":
        assert wire_values.decode_event(wire_values.encode_decision(value)) == (name, value)
    elif name == "refused":
        _error(value)
    elif isinstance(value[1], dict):
        wire_values.decode_isolation(value[1])


def _session_info(payload: dict[str, Any]) -> None:
    info = wire_values.decode_session_info(payload)
    again = wire.parse_json(wire.to_json(wire_values.encode_session_info(info)))
    assert wire_values.decode_session_info(again) == info
    assert str(info.isolation)


def _file(payload: dict[str, Any]) -> None:
    info = wire_values.decode_file(payload)
    again = wire.parse_json(wire.to_json(wire_values.encode_file(info)))
    assert wire_values.decode_file(again) == info


def _error(payload: dict[str, Any]) -> None:
    error = decode_error(payload)
    assert isinstance(error, SandboxError)
    assert type(decode_error(wire.parse_json(wire.to_json(encode_error(error))))) is type(error)
    assert str(error)


def values(data: bytes) -> None:
    """A letter that selects the decoder, and the value."""
    kind, data = data[:1], data[1:]
    try:
        if kind == b"r":
            _run(data)
        elif kind == b"e":
            _event(data)
        else:
            payload = wire.parse_json(data)
            {b"s": _session, b"f": _session_info, b"i": _file}.get(kind, _error)(payload)
    except (WireError, SandboxUsageError):
        return


# The client's end.


class _Sink:
    """Receives one exit at most and no output after its stream's end.

    After an exit it may still receive, once, that the rest of the output was lost; then nothing.
    """

    def __init__(self) -> None:
        self.exits = 0
        self.failures = 0
        self.open = {1, 2}
        self.received = {1: 0, 2: 0}
        self.full = 0

    def event(self, event: object) -> None:
        assert self.failures == 0
        if isinstance(event, Failed):
            self.failures += 1
            return
        assert self.exits == 0
        if isinstance(event, Exited):
            self.exits += 1

    def output(self, fd: int, data: bytes) -> bool:
        assert fd in self.open
        assert data
        self.received[fd] += len(data)
        self.full += 1
        return self.full % 3 != 0

    def end_of_output(self, fd: int) -> None:
        assert fd in self.open
        self.open.discard(fd)

    def decision(self, decision: object) -> None: ...


class _ClientConnection:
    def __init__(self) -> None:
        self.forgotten = 0
        self.ended: list[object] = []

    def forget(self, _run: object) -> None:
        self.forgotten += 1

    def ack_now(self, run: RemoteRun) -> None:
        list(wire.decode(run.ack()))

    ack_later = ack_now

    def send(self, frame: bytes) -> None:
        list(wire.decode(frame))


async def _client(data: bytes) -> None:
    sink = _Sink()
    run = RemoteRun(
        1, b"body", sink, connection=_ClientConnection(), isolation=ISOLATION, fds={1, 2}
    )  # type: ignore[arg-type]
    run.feed_stdin(bytes(10))
    try:
        for frame in wire.decode(data):
            known = {fd: stream.received for fd, stream in run._streams.items()}
            run.receive(frame)
            if frame.kind is Kind.OUTPUT:
                fd, offset, _ = wire.decode_output(frame.payload)
                assert offset <= known[fd], "output with a gap before it"
            if sink.full % 3 == 0:
                run._continue(1)
                run._continue(2)
    except WireError:
        run.fail("not of this protocol")
    list(run.resume_frames())
    if run.started.done():
        run.started.exception()


def client(data: bytes) -> None:
    """Frames of a server about one run."""
    LOOP.run_until_complete(_client(data))


# The server's end.


class _Engine:
    """A transport and its runs, which accept every call."""

    isolation = ISOLATION

    async def start(self, _spec: RunSpec, sink: ServerRun) -> _Engine:
        sink.event(Started(2))
        for fd, stream in sink.log.streams.items():
            sink.output(fd, bytes(range(fd, 200)))
            assert stream.end
        return self

    def resume(self, fd: int) -> None:
        assert fd in {1, 2}

    def signal(self, signum: int) -> None:
        assert 0 < signum < 65

    def end(self, cause: str) -> None:
        assert cause in {"closed", "timeout"}

    def resize(self, rows: int, cols: int) -> None:
        assert 0 < rows < 65536
        assert 0 < cols < 65536

    def feed_stdin(self, data: bytes) -> None:
        assert isinstance(data, bytes)

    async def drain_stdin(self) -> None: ...

    def close_stdin(self) -> None: ...


class _ServerSession:
    def __init__(self, buffers: Buffers) -> None:
        self.runs: dict[int, ServerRun] = {}
        self.buffers = buffers
        self.name = "fuzz"
        self.bytes = (ByteBudget(1 << 20), ByteBudget(1 << 20))

    def check_room(self, grant: Grant, *, needs_slot: bool) -> None:
        assert isinstance(needs_slot, bool)
        if len(self.runs) >= 16:
            raise busy("no room")

    def start(
        self, number: int, start: wire_values.Start, grant: Grant, *, is_private: bool
    ) -> ServerRun:
        assert is_private in {True, False}
        spec = wire_values.decode_run_start(start, SESSION)
        run = ServerRun(number, spec, self.buffers, grant)
        self.runs[number] = run
        try:
            run.start(_Engine()).send(None)  # type: ignore[arg-type]
        except StopIteration:
            return run
        raise AssertionError("the engine of this test never waits")

    def refused(self, number: int, error: SandboxError, grant: Grant) -> ServerRun:
        run = ServerRun(number, RunSpec(kind="shell", text="x"), self.buffers, grant)
        run.refuse(error)
        self.runs[number] = run
        return run

    def forget_if_complete(self, run: ServerRun) -> None:
        del self.runs[run.number]


class _Socket:
    """A connection with these messages; the server's replies are read in between."""

    def __init__(self, messages: list[bytes]) -> None:
        self.messages = messages
        self.connection: ServerConnection | None = None

    async def __aiter__(self) -> Any:
        for message in self.messages:
            yield message
            await asyncio.sleep(0)
            assert self.connection is not None
            for frame in wire.decode(b"".join(self.connection._next_pieces())):
                assert frame.kind >= Kind.OUTPUT
                if frame.kind is Kind.OUTPUT:
                    fd, offset, data = wire.decode_output(frame.payload)
                    assert data == bytes(range(fd, 200))[offset : offset + len(data)]


async def _server(data: bytes) -> None:
    buffers = Buffers(1 << 30)
    session = _ServerSession(buffers)
    sessions = types.SimpleNamespace(
        buffers=buffers,
        metrics=Metrics(),
        bytes=RequestBytes(0, 4),
        frames=FrameBudgets(),
        close_soon=lambda *_: None,
    )
    ws = _Socket(data.split(NEXT_MESSAGE)[:8])
    grant = Grant() if data[:1] != b"\1" else Grant("fuzz", "guest")
    connection = ws.connection = ServerConnection(
        ws, session, sessions, grant=grant, is_private=data[:1] != b"\2"
    )  # type: ignore[arg-type]
    try:
        await connection._receive()
    except WireError:
        pass
    finally:
        assert buffers.held >= 0
        for run in session.runs.values():
            run.release()
        await asyncio.sleep(0)
        assert buffers.held == 0
        unfinished = sum(len(parts.data) for parts in connection._partial.values())
        running = sum(not run.over.done() for run in session.runs.values())
        assert unfinished <= sessions.bytes.all.held
        assert running or sessions.bytes.all.held == unfinished
        if connection._part_timer is not None:
            connection._part_timer.cancel()


def server(data: bytes) -> None:
    """Messages of a client, separated by four fixed bytes."""
    LOOP.run_until_complete(_server(data))


# The log of a run for a client that may reconnect.


def replay(data: bytes) -> None:
    """Two bytes per step: acknowledging, losing and sending again never changes the content."""
    log = RunLog({1: StreamLog()})
    stream, written, have = log.streams[1], 0, 0
    for at in range(0, min(len(data), 128) - 1, 2):
        op, number = data[at] % 6, data[at + 1]
        try:
            if op == 0:
                size = number * (80 if at % 9 == 0 else 1)
                stream.append(PATTERN[written : written + size])
                written += size
                log.events.append(b"e")
            elif op == 1:
                for offset, piece in stream.unsent(number * 50):
                    assert PATTERN[offset : offset + len(piece)] == piece
                    have = max(have, offset + len(piece))
                assert all(event == b"e" for _, event in log.events.unsent(number))
            elif op == 2:
                log.ack(Offsets(number * have // 255, 0, number * log.events.sent // 255))
            elif op == 3:
                log.rewind(Offsets(number * have // 255, 0, log.events.acked))
            elif op == 4:
                log.ack(Offsets(number * number, 0, number))
            else:
                log.rewind(Offsets(number * number, 0, number))
        except WireError:
            pass
        assert 0 <= stream.acked <= stream.sent <= stream.end == written
        assert sum(map(len, stream._kept)) == stream.end - stream.acked
        assert sum(map(len, stream._waiting)) == stream.end - stream.sent
        assert 0 <= log.events.acked <= log.events.sent <= log.events.end


# The first process of a sandbox, if an attacker controls it.


class _LocalSink(_Sink):
    def output(self, fd: int, data: bytes) -> bool:
        return True

    def end_of_output(self, fd: int) -> None: ...


_NOWHERE: Any = types.SimpleNamespace(
    readers=types.SimpleNamespace(remove=lambda _: None), kill=lambda _: True
)


async def _messages(data: bytes) -> None:
    # Counted, because the lowest free number may be reused: an ended run closes its socket.
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        ours.setblocking(False)
        sandbox = Sandbox(1, ours, channel=_NOWHERE, owner=None)
        run = LocalRun(sandbox, isolation=ISOLATION)
        run._sink = run.output.sink = _LocalSink()
        for piece in data.split(NEXT_MESSAGE)[:6]:
            if len(piece) > 1:
                count = piece[0] % 4
                socket.send_fds(theirs, [piece[1:]], [theirs.fileno()] * count)
        run._on_message()
    finally:
        ours.close()
        theirs.close()
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor was left open"


def messages(data: bytes) -> None:
    """Messages of a sandbox to the host; the first byte is the number of file descriptors."""
    LOOP.run_until_complete(_messages(data))


# The socket between a local server and its owner.


async def _line(data: bytes) -> None:
    reader = asyncio.StreamReader(limit=wire.MAX_MESSAGE)
    reader.feed_data(data)
    reader.feed_eof()
    written: list[bytes] = []
    writer = types.SimpleNamespace(is_closing=lambda: False, write=written.append)
    got = 0
    try:
        async for message in SocketStream(reader, writer, ping_every_s=None):  # type: ignore[arg-type]
            assert message, "an empty one is a question, and answered"
            got += len(message)
            _greeting(message)
    except WireError:
        pass
    assert got <= len(data)
    assert set(written) <= {bytes(4)}


def _greeting(data: bytes) -> None:
    sessions: Any = types.SimpleNamespace(draining=False, get=lambda name: name)
    try:
        payload = parse_json(data)
        _, session = _authenticate(payload, sessions, AUTHORITY)
    except SandboxError:
        return
    assert (session, payload["token"].strip()) == ("one", "open sesame")


def line(data: bytes) -> None:
    """Messages on the socket, each handled as the first one: no other token is accepted."""
    LOOP.run_until_complete(_line(data))
