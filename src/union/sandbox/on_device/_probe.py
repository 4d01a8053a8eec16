"""Probe this host: build one sandbox with the session's own plan and verify it from outside.

Nothing is guessed from versions or files. A step that the host refuses either has a fallback that
is reported (a masked /proc, a file system without id-mapped mounts), or raises
``BackendUnavailableError`` with the cause and the remedies.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from union.sandbox._linux import kernel, remedies
from union.sandbox._linux.descriptors import receive
from union.sandbox._linux.protocol import SIMPLE, FailurePlace, Message, operation
from union.sandbox._plan import plan
from union.sandbox.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from union.sandbox._backends.base import NetworkShape
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._linux.bwrap import Bwrap
    from union.sandbox._plan.adaptation import KernelFeatures

__all__ = [
    "HostFeatures",
    "Outcome",
    "VerifiedSetup",
    "find_features",
    "verified",
    "verify_sandbox",
    "wait_for_shared",
    "wait_until_ready",
]

_TIMEOUT_S: Final = 30.0
_MAX_MESSAGE: Final = 512
_NS_FILES: Final = {"mount": "mnt"}
_TRANSIENT: Final = (
    errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS, errno.EMFILE, errno.ENFILE, errno.EINTR,
    errno.ENOSPC, errno.EIO, errno.ESTALE, errno.ETIMEDOUT,
)  # fmt: skip
"""Transient errors, which do not show that this machine lacks a feature."""


@dataclass(frozen=True, slots=True)
class HostFeatures:
    """Features of this host that plans may use."""

    fresh_proc: bool = True
    pivot: bool = True
    """Whether the private root is entered by pivot_root; if not, it is moved over the caller's."""
    idmap: bool = True
    redirect: bool = True
    """Whether nf_tables can redirect every connection to the transparent listener."""
    share: bool = True
    """Whether a sandbox can start from a copy of namespaces that were built once."""
    counters: bool = True
    """Whether the limits of a user namespace can be set."""
    own_id: bool = True
    """Whether an id of the session's own can reach all visible paths of the host's root."""
    kernel: KernelFeatures = dataclasses.field(default_factory=kernel.features)

    def is_weaker_than(self, other: HostFeatures) -> bool:
        """Return whether a layer that ``other`` has is missing here; sharing is not a layer."""
        weaker = any(
            getattr(other, name) and not getattr(self, name)
            for name in ("fresh_proc", "pivot", "idmap", "counters", "own_id")
        )
        return weaker or (other.kernel.securebits and not self.kernel.securebits)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of building a sandbox: no failure, or the failed operation and its errno."""

    failure: tuple[int, int] | None
    stderr_text: str = ""
    """Standard error of bwrap, if it was bwrap that failed."""
    copied: bool = False
    """Whether the sandbox started from a shared part that was built successfully."""
    no_new_privs: bool = False
    """What its first process reported; not every /proc shows it."""


async def verify_sandbox(
    sock: socket.socket, pid: asyncio.Future[int], isolation: Isolation, *, owner: int | None
) -> Outcome:
    """Wait for a sandbox and verify it from outside; it remains usable.

    Args:
        sock: the socket of the sandbox.
        pid: resolves to the process that the launcher started for it.
        isolation: the report to verify.
        owner: the host id that its processes must have; None if it has no id of its own.

    """
    outcome = await wait_until_ready(sock)
    if outcome.failure is None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                first = await pid
        except TimeoutError as exc:
            raise OSError(
                errno.ETIMEDOUT, "the launcher did not report the pid of a sandbox"
            ) from exc
        try:
            is_runner = isolation.persist == "machine"
            inside = first if is_runner else _first_inside(first)
            _verify(inside, isolation, owner, no_new_privs=outcome.no_new_privs)
        except (FileNotFoundError, ProcessLookupError, ValueError) as exc:
            return _final_message(sock, exc)
    return outcome


def _final_message(sock: socket.socket, exc: Exception) -> Outcome:
    """Return the failure reported by a sandbox that ended after it was ready."""
    with contextlib.suppress(BlockingIOError, ConnectionResetError):
        while data := sock.recv(_MAX_MESSAGE):
            if int.from_bytes(data[:4], sys.byteorder) != Message.READY:
                return _outcome(data, Message.READY)
    raise OSError(errno.ECHILD, "a sandbox was killed before it could be verified") from exc


async def wait_until_ready(sock: socket.socket) -> Outcome:
    """Wait until a sandbox is built or has failed."""
    return _outcome(await _first_message(sock), Message.READY)


async def wait_for_shared(sock: socket.socket, count: int = 2) -> tuple[Outcome, tuple[int, ...]]:
    """Wait for the shared part; return the outcome and the descriptors of what holds it."""
    outcome = _outcome(await _first_message(sock), Message.SHARED)
    if outcome.failure is not None:
        return outcome, ()
    _, fds = receive(sock, _MAX_MESSAGE, count)
    if len(fds) != count:
        for fd in fds:
            os.close(fd)
        raise _invalid_message()
    return outcome, tuple(fds)


def _outcome(data: bytes, wanted: int) -> Outcome:
    if not data:
        # A missing feature of this machine would have been reported in a message.
        raise OSError(
            errno.ECHILD,
            "a sandbox ended before it was ready: it, or the launcher, was killed",
        )
    if len(data) < SIMPLE.size:
        raise _invalid_message()
    kind, where, error, no_new_privs = SIMPLE.unpack(data[: SIMPLE.size])
    if kind == wanted:
        return Outcome(None, no_new_privs=no_new_privs == 1)
    if kind != Message.FAILED:
        raise _invalid_message()
    return Outcome((operation(where), error), remedies.bwrap_message(data[SIMPLE.size :]))


def _invalid_message() -> OSError:
    return OSError(errno.EPROTO, "a sandbox sent an invalid message before it was ready")


async def _first_message(sock: socket.socket) -> bytes:
    """Return the first message without removing it from the socket."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock.fileno(), readable.set)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await readable.wait()
    except TimeoutError as exc:
        late = f"a sandbox was not ready within {_TIMEOUT_S:.0f} seconds"
        raise OSError(errno.ETIMEDOUT, late) from exc
    finally:
        loop.remove_reader(sock.fileno())
    return sock.recv(_MAX_MESSAGE, socket.MSG_PEEK)


def _first_inside(pid: int) -> int:
    """Return the sandbox's process 1: ``pid`` itself, or the only child of its bwrap."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    lines = [line.split() for line in status.splitlines() if line.startswith("NSpid:")]
    if not lines or len(lines[0]) > 2:
        return pid  # gVisor does not list the numbers, and bwrap does not work there
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii"))


def _verify(pid: int, isolation: Isolation, owner: int | None, *, no_new_privs: bool) -> None:
    """Compare the report with what the kernel shows of the live sandbox."""
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        if ":\t" in line
    )
    sets = ["CapInh", "CapPrm", "CapEff", "CapAmb"]
    if isolation.root != "host":  # without a user namespace only root could empty this one
        sets.append("CapBnd")
    wrong = [name for name in sets if int(status[name], 16)]
    wanted = {"unprivileged": owner, "caller": os.geteuid()}.get(isolation.ids)
    if any(int(number) != wanted for number in status["Uid"].split()):
        wrong.append(f"ids: {isolation.ids}")
    if status.get("NoNewPrivs", "1" if no_new_privs else "0") != "1":
        wrong.append("NoNewPrivs")
    filters = 2 if isolation.egress == "mediated" else 1
    if status.get("Seccomp") != "2" or int(status.get("Seccomp_filters", filters)) < filters:
        wrong.append("Seccomp")
    for name in isolation.namespaces:
        file = f"ns/{_NS_FILES.get(name, name)}"
        own = os.readlink(f"/proc/self/{file}")
        if name == "pid" and isolation.persist == "machine":
            file = "ns/pid_for_children"  # the runner of a command stays outside of the machine
        if os.readlink(f"/proc/{pid}/{file}") == own:
            wrong.append(f"{name} namespace")
    if wrong:
        raise BackendUnavailableError(
            f"a sandbox was built, but is not isolated as planned: {', '.join(wrong)}",
            backend=isolation.backend,
            missing=tuple(wrong),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedSetup:
    """The properties that decide whether a sandbox works; verified once for all that share them."""

    backend: str
    builder: Bwrap | None
    network: NetworkShape
    features: HostFeatures
    ids: str
    persist: str
    device: int
    """The file system of the work dir, which may or may not support id-mapped mounts."""


_known: dict[str, HostFeatures] = {}
verified: set[VerifiedSetup] = set()
"""Setups of which this process has built and verified a sandbox."""


async def find_features(
    trial: Callable[[HostFeatures], Awaitable[Outcome]],
    spec: SessionSpec,
    *,
    without_bwrap: Callable[[HostFeatures], Awaitable[Outcome]],
    opened: HostFeatures | None = None,
) -> HostFeatures:
    """Return the features with which a sandbox can be built for this session.

    Args:
        trial: builds one sandbox with the given features.
        spec: the session.
        without_bwrap: builds the same sandbox by the launcher alone. bwrap reports failures as text
            only; without it, a cause on the host is found as a step and an errno.
        opened: the features that the session was opened with. None of its layers is given up
            later, whatever fails then.

    """
    features = opened or _known.get(spec.backend, HostFeatures())
    if spec.strict:
        features = dataclasses.replace(
            features, fresh_proc=True, redirect=True, pivot=True, counters=True, own_id=True
        )
    share = features.share
    while True:
        outcome = await trial(features)
        if outcome.failure is None:
            _known[spec.backend] = dataclasses.replace(features, idmap=True, own_id=True)
            return features
        op, error = outcome.failure
        lacking = _of_gvisor(features.kernel, op, error)
        is_optional = features.share and spec.persist != "machine"
        if outcome.copied and is_optional and lacking is None:
            features = dataclasses.replace(features, share=False)
            continue
        if op == plan.Wrap.op and outcome.stderr_text:
            op, error = (await without_bwrap(features)).failure or (op, 0)
        weaker = _without_feature(features, op, error, spec)
        if weaker is None or (opened is not None and weaker.is_weaker_than(opened)):
            raise remedies.unavailable(
                spec.backend, op, error, strict=spec.strict, stderr_text=outcome.stderr_text
            )
        # The shared part was not the cause: it failed without one too.
        features = dataclasses.replace(weaker, share=share)


def _without_feature(
    features: HostFeatures, op: int, error: int, spec: SessionSpec
) -> HostFeatures | None:
    """Return the features without the layer of a failed step, or None if it must not be dropped.

    An error that sandboxed code or a lack of resources can cause never drops a layer.
    """
    if op == FailurePlace.IDMAP and features.idmap and error in remedies.NO_ID_MAPS:
        return dataclasses.replace(features, idmap=False)
    if (found := _of_gvisor(features.kernel, op, error)) is not None:
        return dataclasses.replace(features, kernel=found)
    if spec.strict or error in _TRANSIENT:
        return None
    if op == plan.Proc.op and error == errno.EPERM and features.fresh_proc:
        return dataclasses.replace(features, fresh_proc=False)
    if op == plan.Enter.op and features.pivot and spec.backend == "userns":
        return dataclasses.replace(features, pivot=False)
    if op == plan.LandlockPath.op and error == errno.EACCES and features.own_id:
        return dataclasses.replace(features, own_id=False)
    if op in {plan.Netlink.op, plan.SocketOption.op} and features.redirect:
        return dataclasses.replace(features, redirect=False)
    if op == plan.Counter.op and features.counters:
        return dataclasses.replace(features, counters=False)
    return None


def _of_gvisor(known: KernelFeatures, op: int, error: int) -> KernelFeatures | None:
    """Return the features of gVisor's kernel after a failed step; None if they do not explain it.

    Also for strict sessions, which then refuse the weaker layers by name.
    """
    if not kernel.is_gvisor():
        return None
    if op == plan.Lockdown.op and known.securebits and error in {errno.EPERM, errno.EINVAL}:
        return dataclasses.replace(known, securebits=False)
    if op == plan.Netlink.op and known.nf_tables and error not in _TRANSIENT:
        return dataclasses.replace(known, nf_tables=False)
    return None
