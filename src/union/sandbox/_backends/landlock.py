"""``landlock``: no namespace; Landlock rules, two system-call filters and a mediating runner.

For containers whose seccomp profile refuses namespaces. It isolates less than ``userns``: it is
used only by name, and its report says what is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from union.sandbox._core.isolation import Isolation
from union.sandbox._plan import plan as p
from union.sandbox._plan.landlock_rules import landlock_rules
from union.sandbox._seccomp.filter import digest

if TYPE_CHECKING:
    from union.sandbox._backends.base import Setting

__all__ = ["MIN_ABI", "MIN_ABI_FILTERED", "Landlock"]

MIN_ABI: Final = 3
"""Linux 6.2: before it, files that may only be read can be truncated."""
MIN_ABI_FILTERED: Final = 4
"""Linux 6.7: before it, a TCP socket can be bound to a port of the host."""
_SIGNALS_ABI: Final = 6
_NICE: Final = 5
"""The runner must be able to end a tree that uses every processor."""


class Landlock:
    """The host's own root, with rules for what may be read and written."""

    name = "landlock"

    def plan(self, setting: Setting) -> p.Plan:
        view, who = setting.view, setting.identity
        own: list[p.Step] = [p.Subreaper(), p.Unprivileged()]
        if view.terminals:
            own.append(p.Terminal())
        steps: list[p.Step] = [*own, p.Confine(), p.Nice(_NICE)]
        steps += landlock_rules(view, abi=setting.landlock_abi, network=setting.network)
        steps.append(p.Seccomp(setting.seccomp))
        roots = tuple(s.source for s in view.added if s.writable)
        steps.append(p.Mediate(setting.mediated, roots, connect=setting.network == "filtered"))
        ids = who.kind == "unprivileged"
        return p.Plan(
            steps=tuple(steps),
            clone_flags=0,
            uid=(who.host_uid, who.host_uid) if ids else None,
            gid=(who.host_gid, who.host_gid) if ids else None,
        )

    def isolation(self, setting: Setting, *, limits: tuple[tuple[str, str], ...]) -> Isolation:
        return Isolation(
            backend=self.name,
            proc="hidden",
            ids=setting.identity.kind,
            landlock_abi=setting.landlock_abi,
            seccomp=digest(setting.seccomp + setting.mediated),
            capabilities=(),
            no_new_privs=True,
            proc_net="hidden",
            read_only="full",
            limits=limits,
            egress=setting.egress,
            loopback="host" if setting.network == "open" else "none",
            tmp="directory",
            shm="none",
            signals="kernel" if setting.landlock_abi >= _SIGNALS_ABI else "notified",
        )
