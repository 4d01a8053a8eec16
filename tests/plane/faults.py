"""Faults that a test can switch on while the plane runs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class NoPod:
    """The action fails before its pod has a process: an image that cannot be pulled, say."""

    code: str = "ImagePullBackOff"
    message: str = "the image could not be pulled"
    events: tuple[tuple[str, str], ...] = (
        ("Scheduled", "assigned to node-1"),
        ("Failed", "Failed to pull image: manifest unknown"),
        ("BackOff", "Back-off pulling image"),
    )
    """Reason and message of each event of the cluster, in order."""
    after_s: float = 0.1


@dataclass
class Faults:
    """Switches; a change holds for what happens from then on."""

    no_pod: NoPod | None = None
    start_delay_s: float = 0.0
    """How long an action stays queued."""
    pod_delay_s: float = 0.0
    """How long a pod initialises, with a name and without a process."""
    log_lag_s: float = 0.0
    """How long after its pod's start a log shows its first line."""
    logs_down: bool = False
    """Whether the log service returns only errors."""
    log_begins: tuple[str, ...] = ()
    """Lines of an attacker in a log, before those of the pod."""
    watch_cuts: int = field(default=0, init=False)

    def cut_watches(self) -> None:
        """End every watch that is open, with an error; the next one works."""
        self.watch_cuts += 1
