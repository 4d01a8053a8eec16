"""What a server counts, in the text format that Prometheus reads."""

from __future__ import annotations

import resource
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from union.sandbox._core.events import Exited
from union.sandbox._linux.spares import Budget

if TYPE_CHECKING:
    from union.sandbox.server._runs import ServerRun
    from union.sandbox.server._sessions import Sessions

__all__ = ["Metrics", "render"]


@dataclass(slots=True)
class Metrics:
    """Counters since the start."""

    started: float = field(default_factory=time.time)
    sessions_opened: int = 0
    sessions_closed: int = 0
    runs_started: int = 0
    runs_refused: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bad_frames: int = 0
    connections: int = 0
    """Open now."""
    connections_refused: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Requests that were not served, by the reason."""
    ends: Counter[str] = field(default_factory=Counter)
    """Runs that ended, by how."""

    def ended(self, run: ServerRun) -> None:
        end = run.end_event
        if isinstance(end, Exited):
            self.ends[end.reason or "exit"] += 1
        else:
            self.ends["failed" if end is not None else "refused"] += 1


def _peak_bytes() -> int:
    """Since this program began: getrusage() would add that of the process which started it."""
    with open("/proc/self/status", encoding="ascii") as status:
        kib = next(line for line in status if line.startswith("VmHWM:")).split()[1]
    return int(kib) * 1024


def render(metrics: Metrics, sessions: Sessions) -> str:
    """All of it as text."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    lines: list[str] = []

    def add(name: str, kind: str, text: str, *samples: tuple[str, float]) -> None:
        lines.append(f"# HELP sandbox_{name} {text}")
        lines.append(f"# TYPE sandbox_{name} {kind}")
        lines.extend(f"sandbox_{name}{labels} {value:g}" for labels, value in samples)

    add("sessions", "gauge", "Sessions that are open.", ("", len(sessions)))
    add("sessions_opened_total", "counter", "Sessions opened.", ("", metrics.sessions_opened))
    add("sessions_closed_total", "counter", "Sessions closed.", ("", metrics.sessions_closed))
    add("runs", "gauge", "Commands that run.", ("", len(sessions.running)))
    add("runs_started_total", "counter", "Commands asked for.", ("", metrics.runs_started))
    add("runs_refused_total", "counter", "Commands refused.", ("", metrics.runs_refused))
    ends = [(f'{{reason="{reason}"}}', n) for reason, n in sorted(metrics.ends.items())]
    add("runs_ended_total", "counter", "Commands that ended, by the reason.", *ends)
    add("connections", "gauge", "Connections that are open.", ("", metrics.connections))
    add("connections_refused_total", "counter", "Connections over the limit, or too slow.",
        ("", metrics.connections_refused))  # fmt: skip
    refused = [(f'{{reason="{reason}"}}', n) for reason, n in sorted(metrics.refused.items())]
    add("requests_refused_total", "counter", "Requests refused, by the reason.", *refused)
    add("frames_bad_total", "counter", "Connections closed for a bad frame.",
        ("", metrics.bad_frames))  # fmt: skip
    add("sent_bytes_total", "counter", "Bytes sent to clients.", ("", metrics.bytes_sent))
    add("received_bytes_total", "counter", "Bytes from clients.", ("", metrics.bytes_received))
    add("buffer_bytes", "gauge", "Output kept for clients.", ("", sessions.buffers.held))
    add("spares", "gauge", "Sandboxes that wait to be used.", ("", Budget.held()))
    add("draining", "gauge", "1 while the server shuts down.", ("", sessions.draining))
    add("cpu_seconds_total", "counter", "Processor time of the server itself.",
        ("", usage.ru_utime + usage.ru_stime))  # fmt: skip
    add("max_resident_bytes", "gauge", "Peak memory of the server itself.",
        ("", _peak_bytes()))  # fmt: skip
    add("start_time_seconds", "gauge", "When the server started.", ("", metrics.started))
    return "\n".join(lines) + "\n"
