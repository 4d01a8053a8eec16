"""Metrics of a server, in the text format of Prometheus."""

from __future__ import annotations

import resource
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from union.sandbox._core.events import Exited
from union.sandbox._linux.spares import Budget
from union.sandbox._system import IS_LINUX, IS_MACOS

if TYPE_CHECKING:
    from union.sandbox.server._runs import ServerRun
    from union.sandbox.server._sessions import Sessions

__all__ = ["Metrics", "render"]


@dataclass(slots=True)
class Metrics:
    """Counters since the start of the server."""

    started: float = field(default_factory=time.time)
    sessions_opened: int = 0
    sessions_closed: int = 0
    runs_started: int = 0
    runs_refused: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bad_frames: int = 0
    connections: int = 0
    """Number of open connections."""
    connections_refused: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Refused requests by error code."""
    ends: Counter[str] = field(default_factory=Counter)
    """Ended runs by reason."""

    def ended(self, run: ServerRun) -> None:
        """Count the end of a run."""
        end = run.end_event
        if isinstance(end, Exited):
            self.ends[end.reason or "exit"] += 1
        else:
            self.ends["failed" if end is not None else "refused"] += 1


def _peak_bytes() -> int:
    """Return the peak memory of this program.

    On Linux, getrusage() would include the memory of the process before its exec.
    """
    if not IS_LINUX:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if IS_MACOS else peak * 1024
    with open("/proc/self/status", encoding="ascii") as status:
        kib = next(line for line in status if line.startswith("VmHWM:")).split()[1]
    return int(kib) * 1024


def render(metrics: Metrics, sessions: Sessions) -> str:
    """Return all metrics as text."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    lines: list[str] = []

    def add(name: str, kind: str, text: str, *samples: tuple[str, float]) -> None:
        lines.append(f"# HELP sandbox_{name} {text}")
        lines.append(f"# TYPE sandbox_{name} {kind}")
        # repr() is exact; a rounded counter would make rates of a busy server wrong.
        lines.extend(f"sandbox_{name}{labels} {value + 0!r}" for labels, value in samples)

    add("sessions", "gauge", "Open sessions.", ("", len(sessions)))
    add(
        "sessions_opened_total",
        "counter",
        "Sessions opened since the start.",
        ("", metrics.sessions_opened),
    )
    add(
        "sessions_closed_total",
        "counter",
        "Sessions closed since the start.",
        ("", metrics.sessions_closed),
    )
    add("runs", "gauge", "Running commands.", ("", len(sessions.running)))
    add("runs_started_total", "counter", "Commands requested.", ("", metrics.runs_started))
    add("runs_refused_total", "counter", "Commands refused.", ("", metrics.runs_refused))
    ends = [(f'{{reason="{reason}"}}', n) for reason, n in sorted(metrics.ends.items())]
    add("runs_ended_total", "counter", "Ended commands by reason.", *ends)
    add("connections", "gauge", "Open connections.", ("", metrics.connections))
    add("connections_refused_total", "counter", "Connections closed by a limit or a timeout.",
        ("", metrics.connections_refused))  # fmt: skip
    refused = [(f'{{reason="{reason}"}}', n) for reason, n in sorted(metrics.refused.items())]
    add("requests_refused_total", "counter", "Refused requests by error code.", *refused)
    add("frames_bad_total", "counter", "Connections closed for an invalid frame.",
        ("", metrics.bad_frames))  # fmt: skip
    add("sent_bytes_total", "counter", "Bytes sent to clients.", ("", metrics.bytes_sent))
    add(
        "received_bytes_total",
        "counter",
        "Bytes received from clients.",
        ("", metrics.bytes_received),
    )
    add(
        "buffer_bytes",
        "gauge",
        "Unread output kept for clients, in bytes.",
        ("", sessions.buffers.held),
    )
    add("spares", "gauge", "Prepared sandboxes that are not in use.", ("", Budget.held()))
    add(
        "draining", "gauge", "1 while the server is shutting down, else 0.", ("", sessions.draining)
    )
    add("cpu_seconds_total", "counter", "CPU time of the server process.",
        ("", usage.ru_utime + usage.ru_stime))  # fmt: skip
    add("max_resident_bytes", "gauge", "Peak memory of the server process, in bytes.",
        ("", _peak_bytes()))  # fmt: skip
    add(
        "start_time_seconds",
        "gauge",
        "Start of the server, in seconds of Unix time.",
        ("", metrics.started),
    )
    return "\n".join(lines) + "\n"
