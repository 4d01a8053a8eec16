"""What this host really gives: one sandbox is built with the session's own plan and looked at.

Nothing is guessed from versions or files. A step that the host refuses either has another way that
is reported (a masked /proc, a file system without id-mapped mounts), or ends in
``BackendUnavailableError`` with the cause and the remedies.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from union.sandbox._core.plan import OP_NAMES
from union.sandbox._linux.run import READY
from union.sandbox.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.spec import SessionSpec

__all__ = ["Facts", "Outcome", "look", "settle"]

_SIMPLE = struct.Struct("=IIii")
_PATIENCE_S: Final = 30.0
_BIND, _ROOT, _PROC, _NETLINK = 1, 2, 7, 11
_CLONE, _IDMAP, _IDS, _PRIVATE = 101, 102, 104, 105
_NS_FILES: Final = {"mount": "mnt"}


@dataclass(frozen=True, slots=True)
class Facts:
    """What plans may count on."""

    fresh_proc: bool = True
    idmap: bool = True
    redirect: bool = True
    """Whether nf_tables can lead every connection to our door."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trial went: None, or the operation that failed and its errno."""

    failure: tuple[int, int] | None


async def look(sock: socket.socket, pid: asyncio.Future[int], isolation: Isolation) -> Outcome:
    """Waits for a sandbox to be ready and verifies it from outside; it can still be used then."""
    async with asyncio.timeout(_PATIENCE_S):
        data = await _first_message(sock)
        if not data:
            return Outcome((_CLONE, errno.ECHILD))
        kind, where, error, _ = _SIMPLE.unpack(data[: _SIMPLE.size])
        if kind != READY:
            return Outcome((where & 0xFF, error))
        _verify(await pid, isolation)
        return Outcome(None)


async def _first_message(sock: socket.socket) -> bytes:
    """Reads a message without taking it."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock.fileno())
    return sock.recv(64, socket.MSG_PEEK)


def _verify(pid: int, isolation: Isolation) -> None:
    """The report is what the kernel says of a live sandbox, not what the plan intended."""
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        if ":\t" in line
    )
    wrong = [n for n in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb") if int(status[n], 16)]
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


_known: dict[str, Facts] = {}


async def settle(trial: Callable[[Facts], Awaitable[Outcome]], spec: SessionSpec) -> Facts:
    """Finds the facts under which a sandbox can be built for this session."""
    facts = _known.get(spec.backend, Facts())
    if spec.strict:
        facts = dataclasses.replace(facts, fresh_proc=True, redirect=True)
    while True:
        failure = (await trial(facts)).failure
        if failure is None:
            _known[spec.backend] = dataclasses.replace(facts, idmap=True)
            return facts
        op, error = failure
        if op == _PROC and error == errno.EPERM and facts.fresh_proc and not spec.strict:
            facts = dataclasses.replace(facts, fresh_proc=False)
        elif op == _NETLINK and facts.redirect and not spec.strict:
            facts = dataclasses.replace(facts, redirect=False)
        elif op == _IDMAP and facts.idmap:
            facts = dataclasses.replace(facts, idmap=False)
        else:
            raise _unavailable(spec.backend, op, error)


def _unavailable(backend: str, op: int, error: int) -> BackendUnavailableError:
    what, hint = _cause(op, error)
    name = OP_NAMES.get(op, f"step {op}")
    return BackendUnavailableError(
        f"the {backend!r} backend does not work here: {what} ({name}: {os.strerror(error)})",
        backend=backend,
        missing=(name,),
        hint=hint,
    )


def _sysctl(name: str) -> str:
    try:
        return Path("/proc/sys", *name.split(".")).read_text(encoding="ascii").strip()
    except OSError:
        return ""


class _Cause(NamedTuple):
    what: str
    hint: str


def _cause(op: int, error: int) -> _Cause:
    if op == _PROC:
        return _Cause(
            "this container masks /proc, so a fresh one is refused, and strict=True rules out "
            "showing the container's own",
            "drop strict=True, or run the container with an unmasked /proc "
            "(Kubernetes: procMount: Unmasked with hostUsers: false; Docker: "
            "--security-opt systempaths=unconfined)",
        )
    if op == _NETLINK:
        return _Cause(
            "the kernel refuses the rule that leads every connection to the policy, and "
            "strict=True rules out proxies alone",
            "load nf_tables and nft_chain_nat (as root: modprobe nf_tables nft_chain_nat), or "
            "drop strict=True",
        )
    if op == _IDS and os.geteuid() == 0:
        return _Cause(
            "this process is root without CAP_SETFCAP, and the kernel then maps no id",
            "run as an ordinary user (Kubernetes: runAsUser: 1000), or grant the SETFCAP, SETUID "
            "and SETGID capabilities that containers have by default",
        )
    if op == _CLONE:
        return _clone_cause(error)
    if op in {_PRIVATE, _ROOT, _BIND} and error in {errno.EPERM, errno.EACCES}:
        if _sysctl("kernel.apparmor_restrict_unprivileged_userns") == "1":
            return _APPARMOR
        return _Cause(
            "mounts are refused inside a user namespace",
            "a seccomp or AppArmor profile of this container forbids mount(2) or pivot_root(2): "
            "run it with seccomp=unconfined (Kubernetes: seccompProfile: Unconfined) or a profile "
            "that allows them",
        )
    if error == errno.ENOSYS:
        return _Cause("the kernel is too old", "Linux 5.12 or newer is needed")
    return _Cause("a sandbox could not be built", "")


_APPARMOR: Final = _Cause(
    "AppArmor restricts user namespaces on this host",
    "as root: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or give this program an "
    "AppArmor profile with the 'userns' permission",
)


def _clone_cause(error: int) -> _Cause:
    if _sysctl("kernel.unprivileged_userns_clone") == "0":
        return _Cause(
            "user namespaces are switched off for ordinary users",
            "as root: sysctl -w kernel.unprivileged_userns_clone=1",
        )
    if _sysctl("user.max_user_namespaces") == "0" or error == errno.ENOSPC:
        return _Cause(
            "the limit on user namespaces is used up",
            "as root: sysctl -w user.max_user_namespaces=15000",
        )
    if _sysctl("kernel.apparmor_restrict_unprivileged_userns") == "1":
        return _APPARMOR
    if error in {errno.EPERM, errno.ENOSYS}:
        return _Cause(
            "this container's seccomp profile refuses user namespaces",
            "run the container with seccomp=unconfined (Kubernetes: securityContext: "
            "seccompProfile: Unconfined), with a profile that allows clone3, unshare and mount, or "
            "with the SYS_ADMIN capability",
        )
    return _Cause(
        "the kernel made no namespaces", "is it built with user, pid and network namespaces?"
    )
