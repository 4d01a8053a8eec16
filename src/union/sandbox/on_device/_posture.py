"""A posture: a plan ready to be sent, and what it enforces."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Final

from union.sandbox._backends.base import Setting
from union.sandbox._core.seccomp import filter_program
from union.sandbox._linux import kernel
from union.sandbox._linux.launcher import sealed_memfd
from union.sandbox.on_device._network import network_steps
from union.sandbox.on_device._settings import gather, limit_report

if TYPE_CHECKING:
    from union.sandbox._backends.base import Backend, NetworkShape
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._linux import cgroup
    from union.sandbox.on_device._probe import Facts
    from union.sandbox.on_device._workdir import WorkDir

__all__ = ["Posture"]

_EGRESS: Final = {"blocked": "kernel", "filtered": "kernel", "open": "none"}


@functools.cache
def _filter(machine: str) -> bytes:
    return filter_program(machine=machine)


class Posture:
    """What one shape of network, for one session on this host, comes to.

    Owns its descriptors; compared by identity.
    """

    def __init__(
        self,
        spec: SessionSpec,
        shape: NetworkShape,
        *,
        backend: Backend,
        work: WorkDir,
        facts: Facts,
        groups: cgroup.Hierarchy | None,
    ) -> None:
        found = gather(spec, work, shape, fresh_proc=facts.fresh_proc, idmap=facts.idmap)
        egress = _EGRESS[shape] if facts.redirect or shape != "filtered" else "proxy-only"
        setting = Setting(
            view=found.view,
            identity=found.identity,
            network=shape,
            network_steps=network_steps(shape, redirect=facts.redirect),
            egress=egress,
            landlock_abi=kernel.landlock_abi(),
            seccomp=_filter(kernel.machine()),
        )
        limits = limit_report(spec.limits, found.identity, groups)
        self.shape = shape
        self.view = found.view
        self.ca = found.ca
        self.plan = backend.plan(setting)
        self.isolation = backend.isolation(setting, limits=tuple(limits.items()))
        unprivileged = found.identity.kind == "unprivileged"
        self.owner = found.identity.host_uid if unprivileged else None
        """The id that what a command may reopen, such as its pipes, must belong to."""
        self.counts_processes = found.identity.host_uid != 0 and found.identity.kind != "host"
        self.encoded = sealed_memfd("plan", self.plan.encode())
        self.fds = tuple(os.dup(fd) for fd in found.fds)

    def close(self) -> None:
        for fd in (self.encoded, *self.fds):
            os.close(fd)
