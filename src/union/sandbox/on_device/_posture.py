"""A posture: a compiled plan, the resources it refers to, and the isolation it enforces."""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
from typing import TYPE_CHECKING, Final

from union.sandbox._backends.base import Setting, Wrapper
from union.sandbox._linux import cgroup, host, inherited, kernel
from union.sandbox._linux.descriptors import sealed_memfd
from union.sandbox._linux.launcher import LIBRARY
from union.sandbox._plan.adaptation import LINUX
from union.sandbox._seccomp.filter import filter_program
from union.sandbox._seccomp.mediated import mediated_program
from union.sandbox.errors import BackendUnavailableError
from union.sandbox.on_device import _host_root
from union.sandbox.on_device._kernel_files import has_own_counters
from union.sandbox.on_device._network import network_steps
from union.sandbox.on_device._probe import Outcome
from union.sandbox.on_device._settings import limit_report

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Sequence

    from union.sandbox._backends.base import Backend, NetworkShape
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._linux import bwrap
    from union.sandbox._linux.channel import Channel
    from union.sandbox._linux.prepared import Sandbox
    from union.sandbox._plan.adaptation import KernelFeatures
    from union.sandbox._plan.plan import Plan
    from union.sandbox.on_device._private_root import PrivateRoot
    from union.sandbox.on_device._probe import HostFeatures
    from union.sandbox.on_device._programs import Programs
    from union.sandbox.on_device._settings import HostSetting

__all__ = ["Posture"]

_EGRESS: Final = {"blocked": "kernel", "filtered": "kernel", "open": "none"}


@functools.cache
def _filter(
    machine: str, features: KernelFeatures, *, watches_memory: bool, shares_id: bool
) -> bytes:
    return filter_program(
        machine=machine,
        only_counted_memory=watches_memory,
        only_counted_messages=shares_id,
        guard_init=not features.init_is_immune,
        guard_contents=not features.read_only_metadata,
    )


@functools.cache
def _mediated(machine: str, network: str, *, shares_id: bool, abi: int) -> bytes:
    return mediated_program(machine=machine, network=network, shares_id=shares_id, abi=abi)


def _wrapper(found: bwrap.Bwrap) -> Wrapper:
    """Return how to start bwrap: for root, so that the sandbox does not run as root."""
    if not kernel.is_root():
        return Wrapper(program=found.program, mode="caller")
    enters = found.enters_userns and kernel.can_map_mounts()
    return Wrapper(program=found.program, mode="entered" if enters else "nested")


def _can_fork(spec: SessionSpec, found: HostSetting) -> bool:
    """Return whether the session may have a template.

    Its packages must be out of reach of sandboxed code, also by another path.
    """
    if spec.preload is None or not spec.trusts_preload or spec.persist == "machine":
        return False
    if not spec.warm or not LIBRARY.exists():
        return False
    python = host.interpreter()
    writable = [item.source for item in found.view.added if item.writable]
    paths = {*python.paths, *python.site_dirs, *python.editable}
    # Resolved for each session: sandboxed code may have changed a link since the last one.
    places = [os.path.realpath(path) for path in paths]
    return not any(os.path.commonpath((w, place)) == w for place in places for w in writable)


def _needs_cgroup(spec: SessionSpec) -> bool:
    limits = spec.limits
    if limits.memory_bytes is not None or limits.cpus is not None:
        return True
    # The kernel exempts the host's root from the process limit.
    return kernel.is_root() and spec.backend != "none" and not kernel.can_map_mounts()


class Posture:
    """The compiled plan of one network shape, for one session on this host.

    It owns its encoded plans and holds a reference to its private root. It is compared by identity.
    """

    def __init__(
        self,
        spec: SessionSpec,
        shape: NetworkShape,
        *,
        root: PrivateRoot,
        backend: Backend,
        features: HostFeatures,
        programs: Programs,
    ) -> None:
        """Compile the plan, and take over one reference to ``root``, also on failure."""
        self.root = root
        try:
            self._compile(
                spec,
                shape,
                backend=backend,
                features=features,
                programs=programs,
                found=root.found,
            )
        except BaseException:
            root.release()
            raise
        self.read_only = root.found.read_only
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
        unprivileged = found.identity.kind == "unprivileged"
        mediated = b""
        if backend.name == "landlock":
            _host_root.check_kernel(shape)
            egress = "none" if shape == "open" else "mediated"
            mediated = _mediated(
                kernel.machine(), shape, shares_id=not unprivileged, abi=kernel.landlock_abi()
            )
        self.builder = programs.bwrap if backend.name == "bubblewrap" else None
        """The bwrap that builds its sandboxes; None if the launcher builds them alone."""
        watched = groups is None and spec.limits.memory_bytes is not None
        if watched and spec.persist == "machine":
            raise BackendUnavailableError(
                "resources.memory with persist='machine' needs a control group for the session, "
                "and none can be made here",
                backend=spec.backend,
                missing=("control groups",),
                hint="delegate a control group with the memory controller to this user "
                "(systemd-run --user --scope -p Delegate=yes), or leave memory out",
            )
        setting = Setting(
            view=found.view,
            identity=found.identity,
            network=shape,
            network_steps=()
            if mediated
            else network_steps(
                shape, redirect=features.redirect, nf_tables=features.kernel.nf_tables
            ),
            egress=egress,
            landlock_abi=kernel.landlock_abi(),
            seccomp=_filter(
                kernel.machine(),
                features.kernel,
                watches_memory=watched,
                shares_id=found.identity.kind == "caller",
            ),
            kernel=features.kernel,
            mediated=mediated,
            wrapper=None if self.builder is None else _wrapper(self.builder),
            share=features.share,
        )
        self.plan = backend.plan(setting)
        if spec.persist == "machine" and self.plan.machine is None:
            raise _no_machine(setting, spec.backend)
        shares = self.plan.shared is not None
        limits = limit_report(
            spec.limits,
            found.identity,
            groups,
            shared=shares,
            counted=has_own_counters(found.identity) or bool(found.view.counters),
            own_count=features.kernel.own_process_count and not mediated,
            on_host_root=bool(mediated),
        )
        self._budgets = (0, 0)
        if shares and found.identity.host_uid != 0:
            # One more for the template, which has the same id.
            most = min(spec.limits.session_processes + 2, inherited.process_budget())
            self._budgets = (most, inherited.signal_budget())
        self.shape = shape
        self.view = found.view
        self.identity = found.identity
        self.host_env = found.host_env
        self._setting = setting
        self._backend = backend
        self.isolation = backend.isolation(setting, limits=tuple(limits.items()))
        if shares and _can_fork(spec, found):
            self.isolation = dataclasses.replace(self.isolation, python="forked")
        self.shares_counters = limits["epoll"] == "watch"
        """Whether its sandboxes use the epoll watches of the caller's own id."""
        self.shares_id = found.identity.kind == "caller"
        """Whether its sandboxes have the caller's own id."""
        self.owner = found.identity.host_uid if unprivileged else None
        """The id that what a command may reopen, such as its pipes, must belong to."""
        self.counts_processes = found.identity.host_uid != 0 and found.identity.kind != "host"
        self.own_processes = 2 if self.plan.is_wrapped else 1
        """Number of our own processes in a sandbox: the first one inside, and bwrap."""
        self._encoded = sealed_memfd("plan", self.plan.encode())

    def check_strict(self) -> None:
        """Refuse what ``strict=True`` rules out."""
        from union.sandbox.on_device import _strictness

        _strictness.check(self.isolation)

    @property
    def forks_pythons(self) -> bool:
        """Whether waiting Pythons are forked from a template."""
        return self.isolation.python == "forked"

    def start_pythons(self) -> None:
        """Start waiting Pythons instead, because the template was refused."""
        if self.forks_pythons:
            self.isolation = dataclasses.replace(self.isolation, python="started")

    @property
    def polls_memory(self) -> bool:
        """Whether this process samples the memory of a sandbox that has no control group."""
        return self.limits.memory_bytes is not None

    @property
    def cache_key(self) -> bytes:
        """Equal for postures that build the same sandbox."""
        return self.plan.encode()

    async def try_out(self, channel: Channel) -> None:
        """Start a sandbox without a command; on Linux, the probes of bring-up do that."""

    def equip(self, sandbox: Sandbox) -> None:
        """Give a prepared sandbox what it needs besides its socket."""
        sandbox.machine = self.root.machine

    @property
    def is_plain(self) -> bool:
        """Whether its sandboxes need no control group and no memory watch."""
        return self.groups is None and self.limits.memory_bytes is None

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(errno.ESHUTDOWN, "the session was closed meanwhile")

    @property
    def is_intact(self) -> bool:
        """Whether the host's files that its private root shows are still in place."""
        return self.root.is_intact(self.shape)

    @property
    def is_built(self) -> bool:
        """Whether the shared part of its sandboxes is built, if it has one."""
        if self.plan.machine is not None and self.root.machine is None:
            return False
        return self.plan.shared is None or bool(self.root.namespaces)

    async def build(self, channel: Channel) -> Outcome:
        """Build the shared part, if there is one and it is not built yet."""
        self._check_open()
        plan = self.plan.shared
        if plan is None:
            return Outcome(None)
        outcome = await self.root.build(plan, channel)
        if outcome.failure is None and self.plan.machine is not None:
            self._check_open()
            outcome = await self.root.start_machine(
                self.plan.machine, channel, budgets=self._budgets
            )
        self._check_open()
        return outcome

    def prepare(
        self,
        channel: Channel,
        *,
        cgroups: Sequence[int] = (),
        on_gone: Callable[[], None] | None = None,
        pid: asyncio.Future[int] | None = None,
        terminals: bool = False,
        template: int = 0,
    ) -> tuple[int, socket.socket]:
        """Prepare a sandbox, optionally with terminals of its own; see ``Channel.prepare``."""
        self._check_open()
        plan, encoded = self._with_terminals if terminals else (self.plan, self._encoded)
        machine = self.root.machine
        if machine is not None:
            machine.check_alive()
        return channel.prepare(
            plan,
            encoded,
            cgroups=cgroups,
            fds=self.root.fds,
            shared=self.root.namespaces if machine is None else machine.namespaces,
            join=machine is not None,
            on_gone=on_gone,
            pid=pid,
            budgets=self._budgets,
            template=template,
        )

    @functools.cached_property
    def _with_terminals(self) -> tuple[Plan, int]:
        """The plan of a sandbox with terminals, which uses the same shared part."""
        view = dataclasses.replace(self.view, terminals=True)
        plan = self._backend.plan(dataclasses.replace(self._setting, view=view))
        return plan, sealed_memfd("plan", plan.encode())

    def close(self) -> None:
        """Close its file descriptors, whose numbers may be reused, and release its root."""
        os.close(self._encoded)
        self._encoded = -1
        self._closed = True
        if "_with_terminals" in self.__dict__:
            os.close(self._with_terminals[1])
        self.root.release()


def _no_machine(setting: Setting, backend: str) -> BackendUnavailableError:
    """Return the error for a host on which a sandbox can be built, but not a machine."""
    if setting.kernel != LINUX:
        why, hint = "the kernel is gVisor's", "run the container with another runtime"
    elif not setting.view.fresh_proc:
        why = "no /proc of its own can be mounted here"
        hint = "run in a container that does not mask /proc (Kubernetes: procMount: Unmasked)"
    else:
        why = "sandboxes cannot start from a copy of a shared root here"
        hint = "run as an ordinary user, or as root with SYS_ADMIN"
    return BackendUnavailableError(
        f"persist='machine' is not available: {why}",
        backend=backend,
        missing=("machine",),
        hint=f"{hint}, or leave persist out",
    )
