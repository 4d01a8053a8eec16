"""Reports from the first process of a sandbox, decoded and checked.

Sandboxed code that took over that process could send anything: a report of the wrong size, or with
a status that no process can end with, is malformed.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from union.sandbox._core.events import Usage
from union.sandbox._linux.protocol import EXITED, SIMPLE

__all__ = ["Failure", "MalformedReportError", "decode_exited", "decode_failed", "decode_started"]


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


def decode_failed(data: bytes) -> Failure:
    """Return the failure of the sandbox or of the command's start."""
    try:
        _, where, error, _ = SIMPLE.unpack_from(data)
    except struct.error as exc:
        raise MalformedReportError from exc
    return Failure(where, error, data[SIMPLE.size :])


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
