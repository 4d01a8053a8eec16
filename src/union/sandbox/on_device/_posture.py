"""A posture: a compiled plan, the resources it refers to, and the isolation it enforces."""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
from typing import TYPE_CHECKING, Final

from union.sandbox._backends.base import Setting, Wrapper
from union.sandbox._linux import cgroup, inherited, kernel
from union.sandbox._linux.descriptors import sealed_memfd
from union.sandbox._seccomp.filter import filter_program
from union.sandbox.errors import BackendUnavailableError
from union.sandbox.on_device._kernel_files import has_own_counters
from union.sandbox.on_device._network import network_steps
from union.sandbox.on_device._probe import Outcome, wait_for_shared
from union.sandbox.on_device._settings import inspect_host, limit_report

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Iterable, Sequence

    from union.sandbox._backends.base import Backend, NetworkShape
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._linux import bwrap
    from union.sandbox._linux.channel import Channel
    from union.sandbox._plan.plan import Plan
    from union.sandbox.on_device._probe import HostFeatures
    from union.sandbox.on_device._programs import Programs
    from union.sandbox.on_device._session_id import SessionId
    from union.sandbox.on_device._settings import HostSetting
    from union.sandbox.on_device._workdir import WorkDir

__all__ = ["Posture"]

_EGRESS: Final = {"blocked": "kernel", "filtered": "kernel", "open": "none"}


@functools.cache
def _filter(machine: str, *, only_counted_memory: bool) -> bytes:
    return filter_program(machine=machine, only_counted_memory=only_counted_memory)


def _wrapper(found: bwrap.Bwrap) -> Wrapper:
    """Return how to start bwrap: for root, so that the sandbox does not run as root."""
    if not kernel.is_root():
        return Wrapper(program=found.program, mode="caller")
    enters = found.enters_userns and kernel.can_map_mounts()
    return Wrapper(program=found.program, mode="entered" if enters else "nested")


def _needs_cgroup(spec: SessionSpec) -> bool:
    limits = spec.limits
    if limits.memory_bytes is not None or limits.cpus is not None:
        return True
    # The kernel exempts the host's root from the process limit.
    return kernel.is_root() and spec.backend != "none" and not kernel.can_map_mounts()


class Posture:
    """The compiled plan of one network shape, for one session on this host.

    It owns its file descriptors, and is compared by identity.
    """

    def __init__(
        self,
        spec: SessionSpec,
        shape: NetworkShape,
        *,
        backend: Backend,
        work: WorkDir,
        features: HostFeatures,
        programs: Programs,
        own: SessionId,
    ) -> None:
        found = inspect_host(spec, work, shape, features=features, programs=programs, own=own)
        try:
            self._compile(
                spec, shape, backend=backend, features=features, programs=programs, found=found
            )
        except BaseException:
            _close_all(found.fds)
            found.read_only.close()
            raise
        self._fds = found.fds
        self._shared: tuple[int, ...] = ()
        self.read_only = found.read_only
        self._closed = False

    def _compile(
        self,
        spec: SessionSpec,
        shape: NetworkShape,
        *,
        backend: Backend,
        features: HostFeatures,
        programs: Programs,
        found: HostSetting,
    ) -> None:
        self.limits = spec.limits
        self.groups = groups = cgroup.hierarchy() if _needs_cgroup(spec) else None
        """The hierarchy in which each sandbox gets a control group; None for no group."""
        egress = _EGRESS[shape] if features.redirect or shape != "filtered" else "proxy-only"
        self.builder = programs.bwrap if backend.name == "bubblewrap" else None
        """The bwrap that builds its sandboxes; None if the launcher builds them alone."""
        watched = groups is None and spec.limits.memory_bytes is not None
        setting = Setting(
            view=found.view,
            identity=found.identity,
            network=shape,
            network_steps=network_steps(shape, redirect=features.redirect),
            egress=egress,
            landlock_abi=kernel.landlock_abi(),
            seccomp=_filter(kernel.machine(), only_counted_memory=watched),
            wrapper=None if self.builder is None else _wrapper(self.builder),
            share=features.share,
        )
        unprivileged = found.identity.kind == "unprivileged"
        self.plan = backend.plan(setting)
        shares = self.plan.shared is not None
        limits = limit_report(
            spec.limits,
            found.identity,
            groups,
            shared=shares,
            counted=has_own_counters(found.identity) or bool(found.view.counters),
        )
        self._budgets = (0, 0)
        if shares and found.identity.host_uid != 0:
            most = min(spec.limits.session_processes + 1, inherited.process_budget())
            self._budgets = (most, inherited.signal_budget())
        self.shape = shape
        self.view = found.view
        self.host_env = found.host_env
        self._setting = setting
        self._backend = backend
        self.isolation = backend.isolation(setting, limits=tuple(limits.items()))
        self.owner = found.identity.host_uid if unprivileged else None
        """The id that what a command may reopen, such as its pipes, must belong to."""
        self.counts_processes = found.identity.host_uid != 0 and found.identity.kind != "host"
        self.own_processes = 2 if self.plan.is_wrapped else 1
        """Number of our own processes in a sandbox: the first one inside, and bwrap."""
        self._encoded = sealed_memfd("plan", self.plan.encode())

    def check_ids(self, *, strict: bool) -> None:
        """Refuse a strict session of root whose code would have root's own id."""
        if strict and self.isolation.ids == "caller" and kernel.is_root():
            raise BackendUnavailableError(
                f"the {self.isolation.backend!r} backend cannot give sandboxed code an id of its "
                "own here, and strict=True rules out root's own",
                backend=self.isolation.backend,
                missing=("unprivileged ids",),
                hint="keep the work dir and the named paths on a file system with id-mapped mounts "
                "and grant SYS_ADMIN, or run as an ordinary user, or drop strict=True",
            )

    @property
    def is_plain(self) -> bool:
        """Whether its sandboxes need no control group and no memory watch."""
        return self.groups is None and self.limits.memory_bytes is None

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(errno.ESHUTDOWN, "the session was closed meanwhile")

    @property
    def is_intact(self) -> bool:
        """Whether its read-only paths inside writable directories are still in place."""
        return self.read_only.is_intact()

    @property
    def is_built(self) -> bool:
        """Whether the shared part of its sandboxes is built, if it has one."""
        return self.plan.shared is None or bool(self._shared)

    async def build(self, channel: Channel) -> Outcome:
        """Build the shared part, if there is one and it is not built yet."""
        self._check_open()
        plan = self.plan.shared
        if plan is None or self._shared:
            return Outcome(None)
        encoded = sealed_memfd("plan", plan.encode())
        try:
            _, sock = channel.prepare(plan, encoded, fds=self._fds)
        finally:
            os.close(encoded)
        try:
            outcome, namespaces = await wait_for_shared(sock)
        finally:
            sock.close()
        if self._closed:
            _close_all(namespaces)
            self._check_open()
        self._shared = namespaces
        if self._shared:
            # The shared part holds what the plan refers to; an idle session keeps little open.
            _close_all(self._fds)
            self._fds = ()
        return outcome

    def prepare(
        self,
        channel: Channel,
        *,
        cgroups: Sequence[int] = (),
        on_gone: Callable[[], None] | None = None,
        pid: asyncio.Future[int] | None = None,
        terminals: bool = False,
    ) -> tuple[int, socket.socket]:
        """Prepare a sandbox, optionally with terminals of its own; see ``Channel.prepare``."""
        self._check_open()
        plan, encoded = self._with_terminals if terminals else (self.plan, self._encoded)
        return channel.prepare(
            plan,
            encoded,
            cgroups=cgroups,
            fds=self._fds,
            shared=self._shared,
            on_gone=on_gone,
            pid=pid,
            budgets=self._budgets,
        )

    @functools.cached_property
    def _with_terminals(self) -> tuple[Plan, int]:
        """The plan of a sandbox with terminals, which uses the same shared part."""
        view = dataclasses.replace(self.view, terminals=True)
        plan = self._backend.plan(dataclasses.replace(self._setting, view=view))
        return plan, sealed_memfd("plan", plan.encode())

    def close(self) -> None:
        """Close its file descriptors; their numbers may be reused afterwards."""
        _close_all((self._encoded, *self._fds, *self._shared))
        self.read_only.close()
        self._encoded, self._fds, self._shared = -1, (), ()
        self._closed = True
        if "_with_terminals" in self.__dict__:
            os.close(self._with_terminals[1])


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
