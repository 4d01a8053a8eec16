"""``none``: no isolation, for trusted code and for comparison with the other backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from union.sandbox._core.isolation import Isolation
from union.sandbox._plan import plan as p
from union.sandbox._system import IS_LINUX

if TYPE_CHECKING:
    from union.sandbox._backends.base import Setting

__all__ = ["NoIsolation"]


class NoIsolation:
    """The same streams, limits, timeouts and end of the process tree, without isolation."""

    name = "none"

    def plan(self, setting: Setting) -> p.Plan:  # noqa: ARG002 - the protocol
        return p.Plan(steps=(p.Subreaper(),), clone_flags=0)

    def isolation(self, setting: Setting, *, limits: tuple[tuple[str, str], ...]) -> Isolation:  # noqa: ARG002
        # Elsewhere no kernel adopts the orphans of a command for its launcher.
        processes = "tree" if IS_LINUX else "session"
        return Isolation(backend=self.name, limits=limits, processes=processes)
