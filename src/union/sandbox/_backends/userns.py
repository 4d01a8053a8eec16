"""``userns``: kernel namespaces set up by the launcher; no root, no helper program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from union.sandbox._core.isolation import Isolation
from union.sandbox._plan import plan as p
from union.sandbox._plan.adaptation import LINUX, adapted
from union.sandbox._plan.rootfs import (
    can_share,
    hiding_steps,
    landlock_steps,
    machine_steps,
    of_network,
    own_steps,
    shared_steps,
)
from union.sandbox._seccomp.filter import digest

if TYPE_CHECKING:
    from union.sandbox._backends.base import Setting

__all__ = ["NEW", "Userns"]

NEW: Final = {
    "user": 0x10000000,
    "mount": 0x00020000,
    "pid": 0x20000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "cgroup": 0x02000000,
    "net": 0x40000000,
}


_OF_COMMAND: Final = ("user", "mount", "net")
"""Namespaces that a command of a machine does not share with the others of that machine."""
_SHARED: Final = ("user", "mount", "pid")
"""Namespaces in which the shared part is built. Its own pid namespace gives it a /proc."""


class Userns:
    """Every namespace, a private root, no capability, Landlock, and a system-call filter."""

    name = "userns"

    def namespaces(self, setting: Setting) -> tuple[str, ...]:
        """Return the namespaces that a sandbox does not share with the host."""
        missing = set() if setting.kernel.cgroup_namespaces else {"cgroup"}
        if setting.network == "open":
            missing.add("net")
        return tuple(n for n in NEW if n not in missing)

    def plan(self, setting: Setting) -> p.Plan:
        """Return a plan with a shared part where the view allows one."""
        who, view = setting.identity, setting.view
        rest = self._rest(setting)
        network = setting.network_steps
        flags = sum(NEW[n] for n in self.namespaces(setting))
        if not (setting.share and can_share(view)):
            view = of_network(view, setting.network)
            steps = (*shared_steps(view), *own_steps(view), *network, *rest)
            return self.plan_from_host(setting, steps, flags)
        # The shared part does not depend on the network, so all sandboxes of a session use one.
        shared = shared_steps(view, hold=True)
        own = own_steps(view, held=True, network=setting.network)
        machine = self._machine_plan(setting) if _can_have_machine(setting) else None
        if machine is not None:
            flags &= sum(NEW[n] for n in _OF_COMMAND)
        elif view.fresh_proc:
            # The shared part has one too: the kernel mounts a new /proc only where one is visible.
            own += [p.Proc("/proc"), *hiding_steps(view)]
        # A blocked network has no listening sockets, so an untouched one can be reused.
        again = setting.network == "blocked"
        return p.Plan(
            steps=adapted((*network, *own, *rest), setting.kernel),
            clone_flags=flags & ~NEW["net"] if again else flags,
            network=len(network) if again else 0,
            uid=(who.uid, who.uid),
            gid=(who.gid, who.gid),
            deny_setgroups=who.deny_setgroups,
            machine=machine,
            shared=self.plan_from_host(setting, (*shared, p.Share()), sum(NEW[n] for n in _SHARED)),
        )

    def _machine_plan(self, setting: Setting) -> p.Plan:
        """Return the plan of the machine, whose first process runs no sandboxed code."""
        who, view = setting.identity, setting.view
        steps = machine_steps(view)
        if view.fresh_proc:
            steps += [p.Proc("/proc"), *hiding_steps(view)]
        steps += [p.Hostname("sandbox"), p.Share(machine=True), p.Lockdown()]
        steps.append(p.Seccomp(setting.seccomp))
        return p.Plan(
            steps=adapted(tuple(steps), setting.kernel),
            clone_flags=sum(flag for name, flag in NEW.items() if name != "net"),
            uid=(who.uid, who.uid),
            gid=(who.gid, who.gid),
            deny_setgroups=who.deny_setgroups,
        )

    def plan_from_host(self, setting: Setting, steps: tuple[p.Step, ...], flags: int) -> p.Plan:
        """Return a plan that starts from the host's own view."""
        who = setting.identity
        return p.Plan(
            steps=adapted(steps, setting.kernel),
            clone_flags=flags,
            uid=(who.uid, who.host_uid),
            gid=(who.gid, who.host_gid),
            deny_setgroups=who.deny_setgroups,
        )

    def _rest(self, setting: Setting) -> list[p.Step]:
        # The host name is that of the machine, if there is one.
        steps: list[p.Step] = [] if setting.view.machine else [p.Hostname("sandbox")]
        steps.append(p.Lockdown())
        steps.extend(landlock_steps(setting.view, abi=setting.landlock_abi))
        # Last, because the filter refuses the system calls of the steps before it.
        steps.append(p.Seccomp(setting.seccomp))
        return steps

    def isolation(self, setting: Setting, *, limits: tuple[tuple[str, str], ...]) -> Isolation:
        return Isolation(
            backend=self.name,
            namespaces=self.namespaces(setting),
            root="pivot" if setting.view.pivot else "move",
            proc="fresh" if setting.view.fresh_proc else "inherited",
            ids=setting.identity.kind,
            landlock_abi=setting.landlock_abi,
            seccomp=digest(setting.seccomp),
            capabilities=(),
            no_new_privs=True,
            securebits=setting.kernel.securebits,
            proc_net=_proc_net(setting),
            read_only=_read_only(setting),
            limits=limits,
            egress=setting.egress,
            tmp="private",
            shm="private",
            signals="namespace",
            persist="machine" if setting.view.machine else "workdir",
            loopback="host" if setting.network == "open" else "private",
        )


def _can_have_machine(setting: Setting) -> bool:
    """Return whether a machine was requested and can be built: it needs all of Linux."""
    return setting.view.machine and setting.view.fresh_proc and setting.kernel == LINUX


def _proc_net(setting: Setting) -> str:
    if setting.network == "open":
        return "host"
    return "own" if setting.kernel.own_proc_net else "shared"


def _read_only(setting: Setting) -> str:
    # An id of its own owns none of the host's files.
    owns_nothing = setting.identity.kind == "unprivileged"
    return "full" if setting.kernel.read_only_metadata or owns_nothing else "contents"
