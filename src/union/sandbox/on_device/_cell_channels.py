"""The host's end of the socket to an interpreter. Everything received is untrusted and bounded."""

from __future__ import annotations

import abc
import asyncio
import json
import shlex
import struct
from typing import TYPE_CHECKING, Any, Final, Protocol

from union.sandbox._contexts.frames import (
    MAX_PACKET,
    Done,
    FrameError,
    FrameReader,
    Ready,
    decode,
    encode,
)
from union.sandbox._contexts.values import ErrorInfo
from union.sandbox._core.events import Usage

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable

    from union.sandbox._contexts.frames import Event
    from union.sandbox._contexts.specs import CellSpec

__all__ = ["CellChannel", "FramedChannel", "NodeChannel", "ShellChannel"]

_PACKETS_PER_TURN: Final = 64
"""Packets read before other descriptors get their turn."""
_LENGTH: Final = struct.Struct("=I")
_MAX_SHELL_BYTES: Final = 16 * 1024 * 1024


class CellChannel(Protocol):
    """Sends cells to an interpreter and reports its events."""

    on_event: Callable[[Event], bool]
    """Receives each event; False pauses the channel until ``resume``."""
    on_exit_code: Callable[[int], None]
    """Receives the exit code of a shell command, before its ``Done``."""
    on_lost: Callable[[str], None]
    """Called once: the interpreter closed the socket (empty reason) or sent garbage."""

    def start(self) -> None:
        """Begin to read."""

    def send(self, number: int, spec: CellSpec, *, signals: int) -> None:
        """Send a cell; ``signals``: the number of signals that were sent to the previous one."""

    def interrupt(self, number: int) -> None:
        """Ask the interpreter to end a cell, in addition to the signal."""

    def replace(self, number: int) -> None:
        """Let the interpreter end, and the one that was restored continue."""

    def resume(self) -> None:
        """Read again after ``on_event`` returned False."""

    def close(self) -> None:
        """Close the socket."""


class _Socket(abc.ABC):
    """A non-blocking socket that is read by callbacks and written in order."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._is_reading = False
        self._is_writing = False
        self._is_over = False
        self._is_settled = False
        """Whether the interpreter has reported an end, so that it sends nothing before a cell."""
        self._unsent: list[bytes] = []
        self.on_event: Callable[[Event], bool] = lambda _: True
        self.on_exit_code: Callable[[int], None] = lambda _: None
        self.on_lost: Callable[[str], None] = lambda _: None

    def start(self) -> None:
        self.resume()

    def resume(self) -> None:
        if not self._is_over and not self._is_reading:
            self._is_reading = True
            self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def _pause(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._sock.fileno())

    def interrupt(self, number: int) -> None:  # noqa: B027 - a default, not a gap
        """Nothing to send: the signal is enough."""

    def replace(self, number: int) -> None:
        raise FrameError(f"this interpreter cannot be restored, but was in cell {number}")

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._is_over = True
            self._pause()
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()

    def _lose(self, reason: str) -> None:
        if not self._is_over:
            self.close()
            self.on_lost(reason)

    def _on_readable(self) -> None:
        for _ in range(_PACKETS_PER_TURN):
            if not self._is_reading:
                return
            try:
                data = self._sock.recv(MAX_PACKET + 1)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose("")
                return
            try:
                self._on_data(data)
            except FrameError as exc:
                self._lose(str(exc))
                return
            if self._is_settled:
                self._is_settled = False
                return  # anything beyond that is read in the next turn

    @abc.abstractmethod
    def _on_data(self, data: bytes) -> None:
        """Take one packet.

        Raises:
            FrameError: the packet is malformed; the channel is closed.

        """

    def _write(self, parts: Iterable[bytes]) -> None:
        """Send parts in order; those that do not fit follow when the socket has room."""
        is_idle = not self._unsent
        self._unsent.extend(parts)
        if is_idle and not self._is_over:
            self._on_writable()

    def _on_writable(self) -> None:
        while self._unsent:
            part = self._unsent[0]
            try:
                sent = self._sock.send(part)
            except BlockingIOError:
                self._is_writing = True
                self._loop.add_writer(self._sock.fileno(), self._on_writable)
                return
            except OSError:
                # It has ended; reading reports that.
                self._unsent.clear()
                break
            if sent == len(part):
                del self._unsent[0]
            else:
                self._unsent[0] = part[sent:]
        if self._is_writing:
            self._is_writing = False
            self._loop.remove_writer(self._sock.fileno())


class FramedChannel(_Socket):
    """The channel to a driver that exchanges the messages of ``_contexts.frames``."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._reader = FrameReader()

    def _on_data(self, data: bytes) -> None:
        if len(data) > MAX_PACKET:
            raise FrameError(f"a packet of more than {MAX_PACKET} bytes")
        body = self._reader.feed(data)
        if body is None:
            return
        event = decode(body)
        self._is_settled = isinstance(event, Done)
        if not self.on_event(event):
            self._pause()

    def send(self, number: int, spec: CellSpec, *, signals: int) -> None:
        head: dict[str, Any] = {"op": spec.operation, "n": number}
        if spec.env:
            head["env"] = dict(spec.env)
        if spec.name:
            head["name"] = spec.name
        if signals:
            head["signals"] = signals
        self._write(encode(head, spec.code))

    def replace(self, number: int) -> None:
        self._write(encode({"op": "replace", "n": number}))


class NodeChannel(FramedChannel):
    """The channel to the Node driver: a stream, in which each packet follows its length.

    A busy loop of Node ends by a message and not by a signal.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._buffer = b""

    def _on_data(self, data: bytes) -> None:
        data = self._buffer + data
        start = 0
        # Many small packets in one read must not be copied once for each of them.
        while not self._is_over and len(data) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(data, start)
            if size > MAX_PACKET:
                raise FrameError(f"a packet of {size} bytes, the limit is {MAX_PACKET}")
            end = start + _LENGTH.size + size
            if len(data) < end:
                break
            super()._on_data(data[start + _LENGTH.size : end])
            start = end
        self._buffer = data[start:]

    def _write(self, parts: Iterable[bytes]) -> None:
        super()._write(_LENGTH.pack(len(part)) + part for part in parts)

    def interrupt(self, number: int) -> None:
        self._write(encode({"op": "interrupt", "n": number}))


_BOOT: Final = r"""PS1= PS2= PROMPT_COMMAND=; set +m; unset HISTFILE
__sbx() { local __c; IFS= read -r -d '' -u 100 __c || exit 0; { eval "$__c"; } 100>&- 101>&- </dev/null; }
__end() { printf 's%s\0' "$?" >&100; }
__get() { if [[ -v $1 ]]; then printf 'v%s\0' "${!1}" >&100; else return 1; fi; }
__end
"""  # noqa: E501 - one line for each function, as bash reads it
"""An interactive bash without a terminal: an interrupt ends the command and not the shell. The
text of a command arrives on descriptor 100, so that an open quote or here-document is an error and
not a wait. Its stdin is empty, and its processes inherit neither descriptor."""


class ShellChannel(_Socket):
    """The channel to a bash that evaluates one command at a time.

    Args:
        sock: a stream socket, descriptor 100 of the shell.
        feed: writes to the standard input of the shell.

    """

    def __init__(self, sock: socket.socket, feed: Callable[[bytes], None]) -> None:
        super().__init__(sock)
        self._feed = feed
        self._buffer = bytearray()
        self._number = -1
        self._spec: CellSpec | None = None
        self._value: bytes | None = None

    def start(self) -> None:
        super().start()
        self._feed(_BOOT.encode("ascii"))

    def send(self, number: int, spec: CellSpec, *, signals: int) -> None:
        del signals
        self._number, self._spec, self._value = number, spec, None
        if spec.operation == "get":
            self._feed(f"__get {spec.name}\n__end\n".encode("ascii"))
            return
        code = spec.code
        if spec.operation == "set":
            variables = json.loads(spec.code)
            code = "\n".join(
                f"export {name}={shlex.quote(value)}" for name, value in variables.items()
            ).encode("utf-8", "surrogateescape")
        if spec.env:
            code = _with_env(code, spec.env)
        self._write((code + b"\0",))
        self._feed(b"__sbx\n__end\n")

    def _on_data(self, data: bytes) -> None:
        searched, start = len(self._buffer), 0
        self._buffer += data
        if len(self._buffer) > _MAX_SHELL_BYTES:
            raise FrameError(f"more than {_MAX_SHELL_BYTES} bytes without an end")
        # A long field arrives in many reads: each byte of it is searched once.
        while not self._is_over and (end := self._buffer.find(0, max(searched, start))) >= 0:
            field, start = bytes(self._buffer[start:end]), end + 1
            self._on_field(field)
        del self._buffer[:start]

    def _on_field(self, field: bytes) -> None:
        if field.startswith(b"v"):
            self._value = json.dumps(field[1:].decode("utf-8", "replace")).encode("ascii")
            return
        status = field[1:]
        if not field.startswith(b"s") or not status.isdigit() or len(status) > 3:
            raise FrameError("the shell reported no exit code")
        if self._spec is None:
            if self._number < 0:
                self._number = 0
                self.on_event(Ready())
            return
        error = None
        if self._spec.operation == "get" and self._value is None:
            error = ErrorInfo(name="NameError", value=f"{self._spec.name} is not set")
        else:
            self.on_exit_code(int(status))
        self._spec = None
        self.on_event(
            Done(number=self._number, error=error, usage=Usage(), dropped=0, value=self._value)
        )


def _with_env(code: bytes, env: tuple[tuple[str, str], ...]) -> bytes:
    """Return a command that sets variables, runs ``code``, and restores their previous values."""
    names = " ".join(name for name, _ in env)
    save = "".join(
        f"[[ -v {name} ]] && __old_{name}=${{{name}}}; export {name}={shlex.quote(value)}; "
        for name, value in env
    )
    restore = (
        f'for __n in {names}; do __o=__old_$__n; if [[ -v $__o ]]; then export $__n="${{!__o}}"; '
        f"unset $__o; else unset $__n; fi; done; unset __n __o; "
    )
    text = f"{save}\neval {shlex.quote(code.decode('utf-8', 'surrogateescape'))}\n__r=$?; {restore}"
    text += "(exit $__r)"
    return text.encode("utf-8", "surrogateescape")
