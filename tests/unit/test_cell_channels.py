"""The channels to interpreters read fields and packets that arrive in any pieces."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

import pytest

from union.sandbox._contexts.frames import MAX_PACKET, Display, Done, FrameError, Ready, encode
from union.sandbox._contexts.specs import resolve_request
from union.sandbox.on_device._cell_channels import NodeChannel, ShellChannel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from union.sandbox._contexts.frames import Event

LENGTH = struct.Struct("=I")


@pytest.fixture
async def near() -> AsyncIterator[socket.socket]:
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far:
        yield near


def packed(number: int, text: bytes) -> bytes:
    head = {"t": "display", "n": number, "parts": [{"mime": "text/plain", "size": len(text)}]}
    return b"".join(LENGTH.pack(len(packet)) + packet for packet in encode(head, text))


@pytest.mark.parametrize("piece", [1, 7, 4096, 1 << 20])
async def test_packets_of_node_arrive_in_pieces_or_together(near: socket.socket, piece: int):
    channel = NodeChannel(near)
    seen: list[Event] = []
    channel.on_event = lambda event: seen.append(event) or True  # type: ignore[func-returns-value]
    data = b"".join(packed(number, b"x" * number) for number in range(50))
    for start in range(0, len(data), piece):
        channel._on_data(data[start : start + piece])
    assert [event.number for event in seen if isinstance(event, Display)] == list(range(50))
    assert channel._buffer == b""


async def test_a_packet_over_the_limit_is_refused(near: socket.socket):
    channel = NodeChannel(near)
    channel._on_data(LENGTH.pack(MAX_PACKET))
    with pytest.raises(FrameError, match="the limit is"):
        NodeChannel(near)._on_data(LENGTH.pack(MAX_PACKET + 1))


@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
async def test_fields_of_bash_arrive_in_pieces_or_together(near: socket.socket, piece: int):
    channel = ShellChannel(near, lambda _: None)
    seen: list[Event] = []
    channel.on_event = lambda event: seen.append(event) or True  # type: ignore[func-returns-value]
    channel._on_data(b"s0\0")
    channel.send(1, resolve_request("get", "x", "bash", timeout_s=None), signals=0)
    for start in range(0, len(data := b"v" + b"a" * 5000 + b"\0s0\0s1\0"), piece):
        channel._on_data(data[start : start + piece])
    ready, done = seen  # the last status belongs to no cell
    assert isinstance(ready, Ready)
    assert isinstance(done, Done)
    assert done.value == b'"' + b"a" * 5000 + b'"'


async def test_a_field_of_bash_without_an_end_is_refused(near: socket.socket):
    channel = ShellChannel(near, lambda _: None)
    piece = b"v" * (1 << 20)
    for _ in range(16):
        channel._on_data(piece)
    with pytest.raises(FrameError, match="without an end"):
        channel._on_data(b"v")
