"""Messages over a stream socket behave like those of SOCK_SEQPACKET, one frame for each."""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

import pytest

from union.sandbox._linux.descriptors import receive, send_with_fds
from union.sandbox._linux.framed_socket import HEAD, FramedSocket

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pair() -> Iterator[tuple[FramedSocket, socket.socket]]:
    ours, theirs = FramedSocket.pair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def frame(data: bytes, descriptors: int = 0) -> bytes:
    return HEAD.pack(len(data), descriptors) + data


def test_a_message_is_one_frame(pair: tuple[FramedSocket, socket.socket]) -> None:
    ours, theirs = pair
    assert ours.send(b"hello") == 5
    assert theirs.recv(100) == frame(b"hello")


def test_descriptors_go_with_the_frame_that_announces_them(
    pair: tuple[FramedSocket, socket.socket],
) -> None:
    ours, theirs = pair
    near, far = os.pipe()
    send_with_fds(ours, b"take", [far])
    data, fds, _, _ = socket.recv_fds(theirs, 100, 4)
    assert data == frame(b"take", 1)
    os.write(fds[0], b"through")
    assert os.read(near, 100) == b"through"
    for fd in (near, far, *fds):
        os.close(fd)


def test_messages_arrive_whole_and_apart(pair: tuple[FramedSocket, socket.socket]) -> None:
    ours, theirs = pair
    both = frame(b"first") + frame(b"second")
    theirs.sendall(both[:3])
    with pytest.raises(BlockingIOError):
        ours.recv(100)
    theirs.sendall(both[3:])
    assert receive(ours, 100, 8) == (b"first", [])
    assert ours.recv(3) == b"sec"  # the rest of a message is lost, as with SOCK_SEQPACKET
    with pytest.raises(BlockingIOError):
        ours.recv(100)


def test_the_end_of_the_stream_is_an_empty_message(
    pair: tuple[FramedSocket, socket.socket],
) -> None:
    ours, theirs = pair
    theirs.sendall(frame(b"last"))
    theirs.close()
    assert ours.recv(100) == b"last"
    assert ours.recv(100) == b""


@pytest.mark.parametrize("head", [HEAD.pack(1 << 30, 0), HEAD.pack(4, 1)])
def test_bytes_that_are_no_frame_are_refused(
    pair: tuple[FramedSocket, socket.socket], head: bytes
) -> None:
    ours, theirs = pair
    theirs.sendall(head + b"abcd")
    with pytest.raises(OSError, match=os.strerror(errno.EPROTO)):
        ours.recv(100)


def test_nothing_is_sent_when_the_buffer_is_full(
    pair: tuple[FramedSocket, socket.socket],
) -> None:
    ours, theirs = pair
    sent = 0
    while True:
        try:
            ours.send(b"x" * 8)
        except BlockingIOError:
            break
        sent += 1
    assert sent > 100
    theirs.setblocking(False)
    received = bytearray()
    while True:
        try:
            received += theirs.recv(1 << 20)
        except BlockingIOError:
            break
    assert bytes(received) == frame(b"x" * 8) * sent


def test_a_large_message_is_sent_whole(pair: tuple[FramedSocket, socket.socket]) -> None:
    ours, theirs = pair
    assert ours.send(b"y" * 60_000) == 60_000
    received = bytearray()
    while len(received) < HEAD.size + 60_000:
        received += theirs.recv(1 << 20)
    assert bytes(received) == frame(b"y" * 60_000)
