"""The message that gives a prepared sandbox its command, and the descriptors that go with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from union.sandbox._linux.descriptors import sealed_memfd, send_with_fds
from union.sandbox._linux.protocol import EXEC, RLIMIT, ExecFlag, Message

if TYPE_CHECKING:
    import socket

    from union.sandbox._linux.command import Command

__all__ = ["hand_over"]

_MAX_INLINE: Final = 60 * 1024


def hand_over(
    sock: socket.socket,
    command: Command,
    far_ends: dict[int, int],
    *,
    report: bool,
    window: tuple[int, int] | None,
) -> None:
    """Send the command to the first process of a prepared sandbox.

    Args:
        sock: the socket to that process.
        command: the command.
        far_ends: descriptors for the command by their `ExecFlag`. Descriptors made here are added;
            the caller closes them all.
        report: whether the sandbox reports the start of the command.
        window: rows and columns of the command's terminal; None: no terminal.

    """
    if command.script is not None:
        far_ends[ExecFlag.SCRIPT] = sealed_memfd("script", command.script)
    body = command.body()
    size = len(body)
    if size > _MAX_INLINE:
        far_ends[ExecFlag.PAYLOAD] = sealed_memfd("request", body)
        body = b""
    flags = sum(far_ends) | (ExecFlag.REPORT_START if report else 0)
    flags |= 0 if window is None else ExecFlag.TTY
    head = EXEC.pack(
        Message.EXEC,
        flags,
        command.slot,
        len(command.rlimits) // RLIMIT.size,
        len(command.programs),
        len(command.argv),
        len(command.env),
        size,
        *(window or (0, 0)),
    )
    send_with_fds(sock, head + body, [*map(far_ends.__getitem__, sorted(far_ends))])
