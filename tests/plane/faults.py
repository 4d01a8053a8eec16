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


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The pod exists and never starts, as on a real cluster: the run goes on, with events."""

    events: tuple[tuple[str, str], ...]
    """Reason and message of each event of the cluster, in order."""


CONFIG_ERROR = Waiting(
    events=(
        ("Scheduled", "Successfully assigned default/a0-0 to node-1"),
        ("Pulled", "Container image already present on machine"),
        (
            "Failed",
            "Error: container has runAsNonRoot and image has non-numeric user (flyte)",
        ),
    )
)
IMAGE_ERROR = Waiting(
    events=(
        ("Scheduled", "Successfully assigned default/a0-0 to node-1"),
        ("Failed", 'Failed to pull image "registry.example/sandbox:1": not found'),
        ("Failed", "Error: ErrImagePull"),
        ("BackOff", 'Back-off pulling image "registry.example/sandbox:1"'),
        ("Failed", "Error: ImagePullBackOff"),
    )
)
CRASH_LOOP = Waiting(
    events=(
        ("Started", "Started container primary"),
        ("BackOff", "Back-off restarting failed container"),
    )
)
UNSCHEDULABLE = Waiting(
    events=(("FailedScheduling", "0/3 nodes are available: 3 Insufficient memory."),)
)


@dataclass(frozen=True, kw_only=True)
class PodEnd:
    """How Kubernetes describes the end of a pod that did not end by itself."""

    reason: str
    message: str
    code: int = 137


OOM_KILLED = PodEnd(reason="OOMKilled", message="container primary terminated: OOMKilled")
EVICTED = PodEnd(
    reason="Evicted", message="The node was low on resource: memory. Container primary was evicted"
)
DELETED = PodEnd(reason="Killing", message="Stopping container primary")


@dataclass
class Faults:
    """Switches; a change holds for what happens from then on."""

    no_pod: NoPod | None = None
    waiting: Waiting | None = None
    """Pods that are created do not start."""
    pod_end: PodEnd | None = None
    """The description of the next pods that are killed."""
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
