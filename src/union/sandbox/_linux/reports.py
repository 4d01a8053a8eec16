"""Reports from the first process of a sandbox, decoded and checked.

Sandboxed code that took over that process could send anything: a report of the wrong size, or with
a status that no process can end with, is malformed.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
from typing import TYPE_CHECKING, NamedTuple

from union.sandbox._core.events import Usage
from union.sandbox._linux.protocol import CONNECT, EXITED, MEMORY, SIMPLE

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Failure",
    "MalformedReportError",
    "decode_connect",
    "decode_exited",
    "decode_failed",
    "decode_memory",
    "decode_started",
    "end_reason",
]


class MalformedReportError(Exception):
    """The sandbox's first process sent a malformed message; no further message is trusted."""


class Failure(NamedTuple):
    """A FAILED report."""

    where: int
    """The operation in the low byte, the index of a plan's step above it."""
    error: int
    """The errno of the operation."""
    stderr: bytes
    """The error output of bwrap; empty unless bwrap failed."""


def decode_started(data: bytes) -> int:
    """Return the pid of the command, as seen inside."""
    try:
        _, _, pid, _ = SIMPLE.unpack(data)
    except struct.error as exc:
        raise MalformedReportError from exc
    return int(pid)


def decode_connect(data: bytes) -> tuple[int, int, bytes, int]:
    """Return the id, the address family, the address and the port of a requested connection."""
    try:
        _, number, family, port, *words = CONNECT.unpack(data)
    except struct.error as exc:
        raise MalformedReportError from exc
    address = b"".join(int(word).to_bytes(8, sys.byteorder) for word in words)
    return int(number), int(family), address, int(port)


def decode_failed(data: bytes) -> Failure:
    """Return the failure of the sandbox or of the command's start."""
    try:
        _, where, error, _ = SIMPLE.unpack_from(data)
    except struct.error as exc:
        raise MalformedReportError from exc
    return Failure(where, error, data[SIMPLE.size :])


def decode_memory(data: bytes) -> tuple[bool, int]:
    """Return whether the tree exceeded its memory limit, and its peak memory in bytes."""
    try:
        _, exceeded, peak = MEMORY.unpack(data)
    except struct.error as exc:
        raise MalformedReportError from exc
    return bool(exceeded), int(peak)


def decode_exited(data: bytes, *, peak_memory: int | None) -> tuple[int, Usage]:
    """Return the exit code of the command, negative for a signal, and the resources it used."""
    try:
        _, status, user_us, system_us, maxrss_kib = EXITED.unpack(data)
    except struct.error as exc:
        raise MalformedReportError from exc
    if not (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
        raise MalformedReportError
    usage = Usage(
        cpu_user_s=user_us / 1e6,
        cpu_system_s=system_us / 1e6,
        max_rss_bytes=maxrss_kib * 1024,
        peak_memory_bytes=peak_memory,
    )
    return os.waitstatus_to_exitcode(status), usage


def end_reason(signum: int, cause: str, was_out_of_memory: Callable[[], bool]) -> str:
    """Return the termination reason of a command.

    Args:
        signum: the signal that ended it; not positive after an exit.
        cause: why the host has ended it; empty if it has not.
        was_out_of_memory: whether the kernel or the watch has killed one of its processes.

    """
    if cause:
        return cause
    # Also when only a child of the command was killed: nothing else would show it.
    if was_out_of_memory():
        return "oom"
    if signum <= 0:
        return ""
    return "limit" if signum in {signal.SIGXCPU, signal.SIGXFSZ} else "signal"
