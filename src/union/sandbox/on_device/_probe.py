"""What this host really gives: one sandbox is built with the session's own plan and looked at.

Nothing is guessed from versions or files. A step that the host refuses either has another way that
is reported (a masked /proc, a file system without id-mapped mounts), or ends in
``BackendUnavailableError`` with the cause and the remedies.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from union.sandbox._linux import causes
from union.sandbox._linux.failures import in_its_words
from union.sandbox._linux.launcher import receive
from union.sandbox._linux.prepared import FAILED
from union.sandbox._linux.run import READY
from union.sandbox.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from union.sandbox._backends.base import NetworkShape
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._linux.bwrap import Bwrap

__all__ = ["HostFeatures", "Outcome", "Verified", "look", "ready", "settle", "shared", "verified"]

_SIMPLE = struct.Struct("=IIii")
_PATIENCE_S: Final = 30.0
_MESSAGE: Final = 512
_SHARED: Final = 44
_NS_FILES: Final = {"mount": "mnt"}
_PASSING: Final = (
    errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS, errno.EMFILE, errno.ENFILE, errno.EINTR,
    errno.ENOSPC, errno.EIO, errno.ESTALE, errno.ETIMEDOUT,
)  # fmt: skip
"""They say nothing about what this machine can do."""


@dataclass(frozen=True, slots=True)
class HostFeatures:
    """What plans may count on."""

    fresh_proc: bool = True
    pivot: bool = True
    """Whether the private root is entered by pivot_root; if not, it is moved over the caller's."""
    idmap: bool = True
    redirect: bool = True
    """Whether nf_tables can lead every connection to our door."""
    share: bool = True
    """Whether a sandbox can begin with a copy of what was built once."""
    counters: bool = True
    """Whether the limits of a user namespace can be set."""

    def is_weaker_than(self, other: HostFeatures) -> bool:
        """Whether a layer that ``other`` has is missing here; sharing is none."""
        return any(
            getattr(other, name) and not getattr(self, name)
            for name in ("fresh_proc", "pivot", "idmap", "counters")
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trial went: None, or the operation that failed and its errno."""

    failure: tuple[int, int] | None
    said: str = ""
    """What bwrap wrote, if it was bwrap that failed."""
    copied: bool = False
    """Whether what it begins with had been built before, and well."""


async def look(
    sock: socket.socket, pid: asyncio.Future[int], isolation: Isolation, *, owner: int | None
) -> Outcome:
    """Waits for a sandbox to be ready and verifies it from outside; it can still be used then.

    ``owner`` is the id of its own that it must have on the host, if any.
    """
    outcome = await ready(sock)
    if outcome.failure is None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                first = await pid
        except TimeoutError as exc:
            raise OSError(errno.ETIMEDOUT, "the launcher did not name a sandbox's process") from exc
        try:
            _verify(_first_inside(first), isolation, owner)
        except (FileNotFoundError, ProcessLookupError, ValueError) as exc:
            return _last_words(sock, exc)
    return outcome


def _last_words(sock: socket.socket, exc: Exception) -> Outcome:
    """What a sandbox said that was ready and then ended all the same."""
    with contextlib.suppress(BlockingIOError, ConnectionResetError):
        while data := sock.recv(_MESSAGE):
            if int.from_bytes(data[:4], sys.byteorder) != READY:
                return _outcome(data, READY)
    raise OSError(errno.ECHILD, "a sandbox was killed before it could be looked at") from exc


async def ready(sock: socket.socket) -> Outcome:
    """Waits until a sandbox is built, or could not be."""
    return _outcome(await _first_message(sock), READY)


async def shared(sock: socket.socket) -> tuple[Outcome, tuple[int, ...]]:
    """Waits for what sandboxes will share: how that went, and the namespaces that hold it."""
    outcome = _outcome(await _first_message(sock), _SHARED)
    if outcome.failure is not None:
        return outcome, ()
    _, fds = receive(sock, _MESSAGE, 2)
    if len(fds) != 2:
        for fd in fds:
            os.close(fd)
        raise _not_understood()
    return outcome, tuple(fds)


def _outcome(data: bytes, wanted: int) -> Outcome:
    if not data:
        # Not a matter of what this machine gives, which would be reported.
        raise OSError(
            errno.ECHILD, "a sandbox ended before it was ready: it, or the launcher, was killed"
        )
    if len(data) < _SIMPLE.size:
        raise _not_understood()
    kind, where, error, _ = _SIMPLE.unpack(data[: _SIMPLE.size])
    if kind == wanted:
        return Outcome(None)
    if kind != FAILED:
        raise _not_understood()
    return Outcome((where & 0xFF, error), in_its_words(data[_SIMPLE.size :]))


def _not_understood() -> OSError:
    return OSError(errno.EPROTO, "what a sandbox said when it should have been ready is no message")


async def _first_message(sock: socket.socket) -> bytes:
    """Reads a message without taking it."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock.fileno(), readable.set)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await readable.wait()
    except TimeoutError as exc:
        late = f"a sandbox was not ready within {_PATIENCE_S:.0f} seconds"
        raise OSError(errno.ETIMEDOUT, late) from exc
    finally:
        loop.remove_reader(sock.fileno())
    return sock.recv(_MESSAGE, socket.MSG_PEEK)


def _first_inside(pid: int) -> int:
    """The sandbox's process 1: this one, or the only child of a bwrap that watches over it."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
    if len(numbers) > 2:
        return pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii"))


def _verify(pid: int, isolation: Isolation, owner: int | None) -> None:
    """The report is what the kernel says of a live sandbox, not what the plan intended."""
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        if ":\t" in line
    )
    wrong = [n for n in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb") if int(status[n], 16)]
    wanted = {"unprivileged": owner, "caller": os.geteuid()}.get(isolation.ids)
    if any(int(number) != wanted for number in status["Uid"].split()):
        wrong.append(f"ids: {isolation.ids}")
    if status["NoNewPrivs"] != "1":
        wrong.append("NoNewPrivs")
    if status.get("Seccomp") != "2":
        wrong.append("Seccomp")
    for name in isolation.namespaces:
        file = f"ns/{_NS_FILES.get(name, name)}"
        if os.readlink(f"/proc/{pid}/{file}") == os.readlink(f"/proc/self/{file}"):
            wrong.append(f"{name} namespace")
    if wrong:
        raise BackendUnavailableError(
            f"a sandbox was built, but is not isolated as planned: {', '.join(wrong)}",
            backend=isolation.backend,
            missing=tuple(wrong),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """All that one sandbox which works has in common with others that then work too."""

    backend: str
    builder: Bwrap | None
    network: NetworkShape
    features: HostFeatures
    ids: str
    device: int
    """The file system of the work dir, which may or may not allow mounts with mapped ids."""


_known: dict[str, HostFeatures] = {}
verified: set[Verified] = set()
"""What was built and looked at in this process."""


async def settle(
    trial: Callable[[HostFeatures], Awaitable[Outcome]],
    spec: SessionSpec,
    *,
    without_bwrap: Callable[[HostFeatures], Awaitable[Outcome]],
    opened: HostFeatures | None = None,
) -> HostFeatures:
    """Finds the features under which a sandbox can be built for this session.

    ``opened`` are those that the session was opened with: none of its layers is given up later,
    whatever goes wrong then.

    Where bwrap fails it only says something. The cause is found by building the same sandbox
    ``without_bwrap``, which fails with a step and an errno if the host is the reason.
    """
    features = opened or _known.get(spec.backend, HostFeatures())
    if spec.strict:
        features = dataclasses.replace(
            features, fresh_proc=True, redirect=True, pivot=True, counters=True
        )
    while True:
        outcome = await trial(features)
        if outcome.failure is None:
            _known[spec.backend] = dataclasses.replace(features, idmap=True)
            return features
        if outcome.copied and features.share:
            features = dataclasses.replace(features, share=False)
            continue
        op, error = outcome.failure
        if op == causes.WRAP and outcome.said:
            op, error = (await without_bwrap(features)).failure or (op, 0)
        weaker = _without(features, op, error, spec)
        if weaker is None or (opened is not None and weaker.is_weaker_than(opened)):
            raise causes.unavailable(spec.backend, op, error, strict=spec.strict, said=outcome.said)
        features = weaker


def _without(features: HostFeatures, op: int, error: int, spec: SessionSpec) -> HostFeatures | None:
    """The features without the layer that a step is part of, if this machine cannot have it.

    An error that sandboxed code or a lack of resources can cause is no reason to do without.
    """
    if op == causes.IDMAP and features.idmap and error in causes.NO_ID_MAPS:
        return dataclasses.replace(features, idmap=False)
    if spec.strict or error in _PASSING:
        return None
    if op == causes.PROC and error == errno.EPERM and features.fresh_proc:
        return dataclasses.replace(features, fresh_proc=False)
    if op == causes.ENTER and features.pivot and spec.backend == "userns":
        return dataclasses.replace(features, pivot=False)
    if op == causes.NETLINK and features.redirect:
        return dataclasses.replace(features, redirect=False)
    if op == causes.COUNTER and features.counters:
        return dataclasses.replace(features, counters=False)
    return None
