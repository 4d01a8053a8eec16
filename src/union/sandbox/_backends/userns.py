"""``userns``: kernel namespaces set up by the launcher; no root, no helper program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from union.sandbox._core.isolation import Isolation
from union.sandbox._plan import plan as p
from union.sandbox._plan.rootfs import (
    can_share,
    hiding_steps,
    landlock_steps,
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


_SHARED: Final = ("user", "mount", "pid")
"""Namespaces in which the shared part is built. Its own pid namespace gives it a /proc."""


class Userns:
    """Every namespace, a private root, no capability, Landlock, and a system-call filter."""

    name = "userns"

    def namespaces(self, setting: Setting) -> tuple[str, ...]:
        """Return the namespaces that a sandbox does not share with the host."""
        return tuple(n for n in NEW if n != "net" or setting.network != "open")

    def plan(self, setting: Setting) -> p.Plan:
        """Return a plan with a shared part where the view allows one."""
        who, view = setting.identity, setting.view
        share = setting.share and can_share(view)
        shared, own = shared_steps(view, hold=share), own_steps(view, held=share)
        rest = self._rest(setting)
        network = setting.network_steps
        flags = sum(NEW[n] for n in self.namespaces(setting))
        if not share:
            return self.plan_from_host(setting, (*shared, *own, *network, *rest), flags)
        if view.fresh_proc:
            # The shared part has one too: the kernel mounts a new /proc only where one is visible.
            own += [p.Proc("/proc"), *hiding_steps(view)]
        # A blocked network has no listening sockets, so an untouched one can be reused.
        again = setting.network == "blocked"
        return p.Plan(
            steps=(*network, *own, *rest),
            clone_flags=flags & ~NEW["net"] if again else flags,
            network=len(network) if again else 0,
            uid=(who.uid, who.uid),
            gid=(who.gid, who.gid),
            deny_setgroups=who.deny_setgroups,
            shared=self.plan_from_host(setting, (*shared, p.Share()), sum(NEW[n] for n in _SHARED)),
        )

    def plan_from_host(self, setting: Setting, steps: tuple[p.Step, ...], flags: int) -> p.Plan:
        """Return a plan that starts from the host's own view."""
        who = setting.identity
        return p.Plan(
            steps=steps,
            clone_flags=flags,
            uid=(who.uid, who.host_uid),
            gid=(who.gid, who.host_gid),
            deny_setgroups=who.deny_setgroups,
        )

    def _rest(self, setting: Setting) -> list[p.Step]:
        steps: list[p.Step] = [p.Hostname("sandbox"), p.Lockdown()]
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
            limits=limits,
            egress=setting.egress,
        )
