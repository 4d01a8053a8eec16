"""Decides where a session runs: on a cluster, or as a process of this machine, with a warning."""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING, Final, Literal

from union.sandbox.errors import BackendUnavailableError, SandboxUsageError, SandboxWarning

if TYPE_CHECKING:
    from union.sandbox.cluster._request import Request

__all__ = ["check_local", "choose_place", "why_no_cluster"]

_CONFIGS: Final = (
    "config.yaml",
    ".flyte/config.yaml",
    "~/.union/config.yaml",
    "~/.flyte/config.yaml",
)
"""Where Flyte looks for its configuration."""
_VARIABLES: Final = ("UCTL_CONFIG", "FLYTECTL_CONFIG", "FLYTE_API_KEY")


def check_local(local: object) -> bool | None:
    """Check the argument ``local``."""
    if not isinstance(local, bool | None):
        raise SandboxUsageError(
            f"local must be None (choose, and warn), True (a process of this machine) or False "
            f"(a cluster is required), not {local!r}",
            argument="local",
        )
    return local


def choose_place(
    request: Request, *, local: bool | None, stacklevel: int
) -> Literal["cluster", "local"]:
    """Decide where a session runs.

    Raises:
        SandboxUsageError: a cluster is required, and there is none.
        BackendUnavailableError: the environment requires gVisor, which a local process lacks.

    """
    why = "local=True was passed" if local else why_no_cluster()
    if not why:
        return "cluster"
    if local is False:
        raise SandboxUsageError(
            f"local=False requires a cluster, and there is none: {why}",
            argument="local",
            code="no-cluster",
            hint=_remedy(),
        )
    if request.runtime == "gvisor":
        raise BackendUnavailableError(
            f"the environment {request.environment!r} has runtime='gvisor', and this session would "
            f"be a process of this machine, without gVisor: {why}",
            backend="gvisor",
            missing=("cluster",),
            code="no-cluster",
            hint=("omit local=True" if local else _remedy())
            + ", or use an environment with runtime='container' here",
        )
    if local is None:
        unknown = (
            ""
            if request.runtime
            else (f" (the isolation of the environment {request.environment!r} is not known here)")
        )
        warnings.warn(
            f"session() runs as a process of this machine, with no pod around it{unknown}: {why}. "
            f"To run on a cluster: {_remedy()}. Pass local=True to accept this, or local=False to "
            "refuse it",
            SandboxWarning,
            stacklevel=stacklevel + 1,
        )
    return "local"


def why_no_cluster() -> str:
    """Return why runs cannot be submitted from here; empty if they can."""
    flyte = sys.modules.get("flyte")
    # A Flyte that was not imported is not initialised either.
    if flyte is not None and flyte.is_control_plane_available():
        return ""
    if flyte is not None and getattr(flyte.ctx(), "mode", None) == "local":
        return "the calling task runs in Flyte's local mode"
    config = _config()
    if config:
        return f"Flyte is configured by {config}, but not initialised in this process"
    return "Flyte is neither configured nor initialised"


def _config() -> str:
    """Return the source of Flyte's configuration, or an empty string, without importing Flyte."""
    for name in _VARIABLES:
        if os.environ.get(name):
            return f"the variable {name}"
    for path in _CONFIGS:
        if os.path.exists(os.path.expanduser(path)):
            return path
    return ""


def _remedy() -> str:
    flyte = sys.modules.get("flyte")
    if flyte is not None and getattr(flyte.ctx(), "mode", None) == "local":
        return "run the task on one with `flyte run FILE TASK`"
    if _config():
        return "call flyte.init_from_config() before session()"
    return "call flyte.init(endpoint=...) before session()"
