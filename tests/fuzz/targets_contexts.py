"""Messages of a context's driver, which shares its process with hostile code, and of its cells."""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Final

from tests.fuzz.targets_wire import ISOLATION, LOOP, SESSION, _ClientConnection

from union.sandbox._contexts import frames
from union.sandbox._contexts.specs import ContextSpec
from union.sandbox._contexts.values import CellEnd, MimeBundle
from union.sandbox._contexts.wire import (
    MessageReader,
    Shown,
    decode_cell,
    decode_change,
    decode_context,
    encode_cell,
    encode_change,
    encode_context,
    encode_end,
)
from union.sandbox._wire import frames as wire
from union.sandbox._wire.values import decode_start_body
from union.sandbox.errors import SandboxError, SandboxUsageError
from union.sandbox.remote._context import RemoteContext, _CellReceiver
from union.sandbox.remote._run import RemoteRun

if TYPE_CHECKING:
    from union.sandbox.remote._http_entries import SentEntries

_MAX_FRAMES: Final = 64


def driver_frames(data: bytes) -> None:
    """Packets, each after its length in two bytes, through the reader and the decoder."""
    reader = frames.FrameReader()
    start = 0
    try:
        while start + 2 <= len(data):
            (size,) = struct.unpack_from(">H", data, start)
            start += 2
            body = reader.feed(data[start : start + size])
            start += size
            if body is not None:
                _check(frames.decode(body), len(body))
            assert sum(map(len, reader._parts)) <= frames.MAX_MESSAGE_BYTES
    except frames.FrameError:
        return


def _check(event: frames.Event, size: int) -> None:
    if isinstance(event, frames.Display):
        assert isinstance(event.bundle, MimeBundle)
        assert 0 <= event.number < 2**53
        assert event.size <= size
        for mime, content in event.bundle.data.items():
            assert isinstance(content, str | bytes)
            mime.encode()
        with contextlib.suppress(ValueError):
            _ = event.bundle.json
    elif isinstance(event, frames.Done) and event.error is not None:
        assert len(event.error.frames) <= _MAX_FRAMES
        for text in (event.error.name, event.error.value, event.error.traceback):
            text.encode()
        for frame in event.error.frames:
            frame.text.encode()


# Cells over a server: each end has a hostile peer.


class _CellSink:
    """Receives one end at most, bounded displays, and nothing after the end."""

    def __init__(self) -> None:
        self.ends = 0
        self.displays = 0

    def output(self, fd: int, data: bytes) -> bool:
        assert fd in {1, 2}
        assert len(data)
        assert not self.ends
        return True

    def display(self, bundle: MimeBundle) -> bool:
        assert not self.ends
        self.displays += 1
        assert self.displays <= frames.MAX_DISPLAYS
        return bool(bundle.data) or True

    def decision(self, decision: object) -> None: ...

    def done(self, end: CellEnd) -> None:
        self.ends += 1
        assert end.state == "lost" or end.ended in {"", "interrupt", "timeout"}
        assert encode_end(end)

    def failed(self, error: SandboxError) -> None:
        self.ends += 1
        assert isinstance(error, SandboxError)


def _no_entries() -> SentEntries:
    raise AssertionError("a cell without an Http entry sends none")


async def _cell_client(data: bytes) -> None:
    """Frames of a server about one cell."""
    sink = _CellSink()
    context = RemoteContext(
        ContextSpec(language="python"), SESSION, isolation=ISOLATION, entries=_no_entries
    )
    cell = _CellReceiver(context, sink, 0)  # type: ignore[arg-type]
    run = cell.run = RemoteRun(
        1, b"", cell, connection=_ClientConnection(), isolation=ISOLATION, fds={1, 2, wire.MESSAGES}
    )  # type: ignore[arg-type]
    try:
        for frame in wire.decode(data):
            run.receive(frame)
    except wire.WireError:
        run.fail("not of this protocol")
    cell.on_started(run.started) if run.started.done() else run.fail("over")
    assert sink.ends <= 1


def cells(data: bytes) -> None:
    """A letter that selects the decoder, and the value."""
    kind, data = data[:1], data[1:]
    try:
        if kind == b"f":
            LOOP.run_until_complete(_cell_client(data))
        elif kind == b"m":
            for message in MessageReader().feed(data):
                assert isinstance(message, Shown | CellEnd)
        elif kind == b"g":
            change = decode_change(wire.parse_json(data))
            assert decode_change(encode_change(change)["context"] | {"at": list(change.at)})
        elif kind == b"o":
            spec = decode_context(decode_start_body(data), SESSION)
            again = decode_context(decode_start_body(encode_context(spec)), SESSION)
            assert again == spec
        else:
            number, cell = decode_cell(decode_start_body(data), SESSION, "python")
            body = encode_cell(cell, SESSION, context=1, number=number)
            assert decode_cell(decode_start_body(body), SESSION, "python") == (number, cell)
    except (wire.WireError, SandboxUsageError):
        return
