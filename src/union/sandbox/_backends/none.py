"""``none``: no isolation at all, for trusted code and for comparing with what isolation does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from union.sandbox._core.isolation import Isolation
from union.sandbox._plan import plan as p

if TYPE_CHECKING:
    from union.sandbox._backends.base import Setting

__all__ = ["NoIsolation"]


class NoIsolation:
    """The same streams, limits, time-outs and end of the process tree; nothing is kept out."""

    name = "none"

    def plan(self, setting: Setting) -> p.Plan:  # noqa: ARG002 - the protocol
        return p.Plan(steps=(p.Subreaper(),), clone_flags=0)

    def isolation(self, setting: Setting, *, limits: tuple[tuple[str, str], ...]) -> Isolation:  # noqa: ARG002
        return Isolation(backend=self.name, limits=limits)
