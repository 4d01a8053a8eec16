"""``userns``: the kernel's namespaces, set up by the launcher; no root, no helper program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from union.sandbox._core import plan as p
from union.sandbox._core.isolation import Isolation
from union.sandbox._core.seccomp import digest
from union.sandbox._core.view import landlock_steps, mount_steps

if TYPE_CHECKING:
    from union.sandbox._backends.base import Setting

__all__ = ["Userns"]

_NEW: Final = {
    "user": 0x10000000,
    "mount": 0x00020000,
    "pid": 0x20000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "cgroup": 0x02000000,
    "net": 0x40000000,
}


class Userns:
    """Every namespace, a private root, no capability, Landlock, and a system-call filter."""

    name = "userns"

    def _namespaces(self, setting: Setting) -> tuple[str, ...]:
        return tuple(n for n in _NEW if n != "net" or setting.network != "open")

    def plan(self, setting: Setting) -> p.Plan:
        steps: list[p.Step] = [*mount_steps(setting.view), p.Hostname("sandbox")]
        steps.extend(setting.network_steps)
        steps.append(p.Remount("/"))
        steps.append(p.Lockdown())
        steps.extend(landlock_steps(setting.view, abi=setting.landlock_abi))
        # Last: the filter refuses what the steps before it do.
        steps.append(p.Seccomp(setting.seccomp))
        who = setting.identity
        return p.Plan(
            steps=tuple(steps),
            clone_flags=sum(_NEW[n] for n in self._namespaces(setting)),
            uid=(who.uid, who.host_uid),
            gid=(who.gid, who.host_gid),
            deny_setgroups=who.deny_setgroups,
        )

    def isolation(self, setting: Setting, *, limits: tuple[tuple[str, str], ...]) -> Isolation:
        return Isolation(
            backend=self.name,
            namespaces=self._namespaces(setting),
            root="pivot_root",
            proc="fresh" if setting.view.fresh_proc else "inherited",
            ids=setting.identity.kind,
            landlock_abi=setting.landlock_abi,
            seccomp=digest(setting.seccomp),
            capabilities=(),
            no_new_privs=True,
            limits=limits,
            egress=setting.egress,
        )
