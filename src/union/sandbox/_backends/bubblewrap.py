"""``bubblewrap``: the system's ``bwrap`` creates the namespaces and mounts.

The launcher executes ``bwrap``, which starts the launcher's own runner as the first process of the
sandbox. Every step after the mounts is therefore the same as with ``userns``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from union.sandbox._backends.userns import NEW, Userns
from union.sandbox._plan import plan as p
from union.sandbox._plan.bwrap_args import divide, namespace_args, staged

if TYPE_CHECKING:
    from union.sandbox._backends.base import Setting

__all__ = ["Bubblewrap"]


class Bubblewrap(Userns):
    """The same sandbox as ``userns``, built by another program."""

    name = "bubblewrap"

    def plan_from_host(self, setting: Setting, steps: tuple[p.Step, ...], flags: int) -> p.Plan:
        wrapper = setting.wrapper
        if wrapper is None:
            raise ValueError("Setting.wrapper is None; a bubblewrap plan needs the bwrap program")
        before: tuple[p.Step, ...] = ()
        if wrapper.mode != "caller":
            before, steps = staged(steps, setting.view.staging)
        who = setting.identity
        args, inside = divide(steps)
        entered = wrapper.mode == "entered"
        args = [
            *namespace_args(
                namespaces=tuple(name for name, flag in NEW.items() if flags & flag),
                uid=who.uid,
                gid=who.gid,
                enter_userns=entered,
                counters=any(isinstance(step, p.Counter) for step in inside),
            ),
            *args,
        ]
        ids = ((who.uid, who.host_uid), (who.gid, who.host_gid))
        last = p.Wrap(wrapper.program, tuple(args), inside, enter=ids if entered else None)
        outside = {"caller": 0, "entered": NEW["mount"], "nested": NEW["user"] | NEW["mount"]}
        nested = wrapper.mode == "nested"
        return p.Plan(
            steps=(*before, last),
            clone_flags=outside[wrapper.mode],
            uid=ids[0] if nested else None,
            gid=ids[1] if nested else None,
            deny_setgroups=nested and who.deny_setgroups,
        )
