"""A task that is called as a plain function gets a reference, as it would on a cluster.

Outside a run (``asyncio.run(parent())``) Flyte calls the function of a task directly, with the very
objects of the caller. An owner's session would arrive as the owner's, and closing it in the child
would end it. Flyte has no hook for such calls, so its method is wrapped, once, when the first
session is made.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
from typing import Any, Final

__all__ = ["install"]

_LOGGER: Final = logging.getLogger("union.sandbox.cluster")
_MARK: Final = "_union_sandbox_passes_references"


def install() -> None:
    """Wrap ``forward`` of Flyte's function tasks, if Flyte is in use."""
    if "flyte" not in sys.modules:
        return
    try:
        from flyte._task import AsyncFunctionTaskTemplate as Template

        forward: Any = Template.forward
    except (ImportError, AttributeError):
        _LOGGER.warning(
            "this version of Flyte calls tasks in another way: a task that is called as a plain "
            "function gets the caller's own session, and close() in it ends the session"
        )
        return
    if hasattr(forward, _MARK):
        return

    @functools.wraps(forward)
    def passing_references(self: Any, *args: Any, **kwargs: Any) -> Any:
        passed = [_passed(value) for value in args]
        named = {name: _passed(value) for name, value in kwargs.items()}
        return forward(self, *passed, **named)

    setattr(passing_references, _MARK, True)
    Template.forward = passing_references  # type: ignore[method-assign]  # see above


def _passed(value: Any) -> Any:
    """Return the argument that a task gets: owners' sessions as references, in containers too."""
    from union.sandbox.cluster._session import SandboxSession

    if isinstance(value, SandboxSession):
        return copy.copy(value) if value.is_owner else value
    if type(value) in {list, tuple}:
        found = [_passed(item) for item in value]
        same = all(new is old for new, old in zip(found, value, strict=True))
        return value if same else type(value)(found)
    if type(value) is dict:
        named = {name: _passed(item) for name, item in value.items()}
        return value if all(named[name] is value[name] for name in value) else named
    return value
