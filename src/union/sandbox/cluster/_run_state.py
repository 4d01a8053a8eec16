"""The state of a run as its control plane reports it: why its pod waits, and why it has ended.

A pod that cannot start is not a failed run: Kubernetes tries again for as long as the run lives.
The events of the cluster show the reason, and an error with that reason reaches the caller long
before any time limit. A pod that has ended is known to the control plane at once, while a client
could only try its address again and again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from union.sandbox.errors import SandboxConnectionError, SandboxExecutionError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "PodWait",
    "describe_run",
    "get_details",
    "launch_hint",
    "phase_of",
    "wait_for_end",
    "waiting_reason",
]

_LOGGER: Final = logging.getLogger("union.sandbox.cluster")
_EVENTS: Final = 5
_POLL_S: Final = 0.5
_SLOW_POLL_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class _Reason:
    """A reason why a pod waits, and its remedy."""

    name: str
    signs: tuple[str, ...]
    """Parts of an event's reason or message, in lower case."""
    patience_s: float | None
    """How long it may last before the session is given up; None: as long as it takes."""
    hint: str
    ended_by: tuple[str, ...] = ("started",)
    """The events after which the reason holds no longer."""


_REASONS: Final = (
    _Reason(
        "CreateContainerConfigError",
        ("createcontainerconfigerror", "runasnonroot", "cannot verify user is non-root"),
        5.0,
        "where the cluster sets runAsNonRoot, the image needs a numeric USER: derive it from "
        "base_sandbox_image. Otherwise check the secrets and variables of the environment",
    ),
    _Reason(
        "CreateContainerError",
        ("createcontainererror", "runcontainererror", "failedmount", "failedcreatepodsandbox"),
        20.0,
        "check the runtime class, the volumes and the security context of the pod",
    ),
    _Reason(
        "ErrImagePull",
        ("errimagepull", "imagepullbackoff", "invalidimagename", "errimageneverpull",
         "failed to pull image", "back-off pulling image"),
        20.0,
        "check that the image exists, that the cluster may pull it, and its architecture; "
        "`unionai-sandbox-deploy` builds and pushes the image of the default environments",
        ("pulled", "started"),
    ),
    _Reason(
        "CrashLoopBackOff",
        ("crashloopbackoff", "back-off restarting failed container"),
        2.0,
        "the log of the pod shows why the server does not start",
        (),
    ),
    _Reason(
        "Unschedulable",
        ("failedscheduling", "unschedulable", "insufficient "),
        None,
        "no node has room for the pod: ask for less with resources=, or add nodes",
        ("scheduled", "pulling", "started"),
    ),
)  # fmt: skip


def phase_of(details: Any) -> str:
    """Return the phase of a run, in lower case."""
    return str(details.phase).rpartition(".")[2].lower()


async def get_details(run: Any) -> Any:
    """Return the present details of a run."""
    from flyte.remote import ActionDetails

    return await ActionDetails.get_details.aio(run.action.action_id)


def _events(details: Any) -> list[Any]:
    attempts = details.pb2.attempts
    return list(attempts[-1].cluster_events) if attempts else []


def describe_run(details: Any) -> str:
    """Describe a run: its phase, its error, and the last events of the cluster."""
    if details is None:
        return "the control plane has not reported its state yet"
    parts = [f"phase {phase_of(details)}"]
    if details.error_info is not None:
        parts.append(details.error_info.message.strip()[-2000:])
    if details.abort_info is not None:
        parts.append(f"aborted: {details.abort_info.reason}")
    parts += [f"[{event.message.strip()[:300]}]" for event in _events(details)[-_EVENTS:]]
    return "; ".join(parts)


def waiting_reason(events: Iterable[tuple[str, str]]) -> tuple[str, str] | None:
    """Return why a pod waits, from its events in order: the name of the reason, and the event.

    ``events`` are pairs of reason and message. None: no event shows a reason that still holds.
    """
    found: tuple[_Reason, str] | None = None
    for reason, message in events:
        text = f"{reason} {message}".lower()
        fresh = next((one for one in _REASONS if any(sign in text for sign in one.signs)), None)
        if fresh is not None:
            found = (fresh, f"{reason}: {message.strip()[:500]}")
        elif found is not None and reason.lower() in found[0].ended_by:
            found = None
    return None if found is None else (found[0].name, found[1])


class PodWait:
    """Follows the reason why the pod of one run waits."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._name = ""
        self._since = 0.0

    def check(self, details: Any) -> None:
        """Raise if the pod has waited too long for one reason; log a new reason once."""
        found = None
        if phase_of(details) in {"queued", "waiting_for_resources", "initializing"}:
            found = waiting_reason((event.reason, event.message) for event in _events(details))
        if found is None:
            self._name = ""
            return
        name, event = found
        reason = next(one for one in _REASONS if one.name == name)
        if name != self._name:
            self._name, self._since = name, time.monotonic()
            _LOGGER.warning("the pod of %s waits: %s: %s", self._run, name, event)
        if reason.patience_s is None or time.monotonic() - self._since < reason.patience_s:
            return
        raise SandboxExecutionError(
            f"the pod of {self._run} does not start: {name}: {event}",
            stage="spawn",
            code="pod-waiting",
            hint=reason.hint,
        )


_ENDS: Final = (
    ("oomkilled", "out of memory", "raise the memory of the environment, or pass resources="),
    ("evicted", "evicted by the cluster", "request the resources that the session really uses"),
    ("deadlineexceeded", "its deadline has passed", "open a new session"),
    ("preempt", "preempted by the cluster", "give the pod a higher priority"),
    ("137", "killed", "its node was lost, or something killed it: see the events of the cluster"),
)


def _end_of(details: Any) -> SandboxConnectionError | None:
    """Return the error of a run that has ended; None while it lives."""
    if not details.done():
        return None
    text = describe_run(details)
    what, hint = "", "open a new session"
    if phase_of(details) == "failed":
        for sign, meaning, remedy in _ENDS:
            if sign in text.lower():
                what, hint = f" ({meaning})", remedy
                break
    return SandboxConnectionError(
        f"the pod of the session has ended{what}: {text}", sent=True, code="pod-ended", hint=hint
    )


def launch_hint(details: Any, url: object) -> str:
    """Return the remedy for a run that ended before its server could be addressed."""
    if details is not None and "permission denied" in describe_run(details).lower():
        return (
            "root without capabilities cannot read files of other users and maps no ids: run the "
            f"pod as an ordinary user (runAsUser: 1000), or grant SETFCAP, SETUID, SETGID and "
            f"DAC_OVERRIDE; see {url}"
        )
    return f"see {url}"


async def wait_for_end(run: Any) -> SandboxConnectionError:
    """Wait until a run has ended; return the error that describes its end."""
    pause_s = _POLL_S
    while True:
        try:
            ended = _end_of(await get_details(run))
        except Exception as exc:  # noqa: BLE001 - any error of the client: the server may still reply
            _LOGGER.debug("the control plane does not reply: %s", exc)
            ended = None
        if ended is not None:
            return ended
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _SLOW_POLL_S)
