"""How a pod finds its task: by its arguments alone, with none of the caller's code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from union.sandbox.cluster._request import SandboxMode

__all__ = ["SandboxResolver"]

_NONE: Final = "-"


class SandboxResolver:
    """Writes down what a pod must know of its environment, and reads it there.

    These are part of what was deployed. A caller cannot change them, so that it is the environment
    that decides which variables of its pod are shown to sandboxes.
    """

    @property
    def import_path(self) -> str:
        return f"{__name__}.{type(self).__name__}"

    def loader_args(self, task: Any, root_dir: object = None) -> list[str]:  # noqa: ARG002 - Flyte's
        environment = task.parent_env()
        return [
            "environment", environment.name,
            "mode", environment.sandbox_mode,
            "forward", ",".join(environment.forwarded) or _NONE,
        ]  # fmt: skip

    def load_task(self, loader_args: Sequence[str]) -> Any:
        from union.sandbox.cluster._environment import SERVED, in_pod

        told = dict(zip(loader_args[::2], loader_args[1::2], strict=True))
        forwarded = () if told["forward"] == _NONE else tuple(told["forward"].split(","))
        environment = in_pod(
            told["environment"], cast("SandboxMode", told["mode"]), forwarded=forwarded
        )
        SERVED.append(environment)  # tasks know their environment by a weak reference
        return environment.server_task
