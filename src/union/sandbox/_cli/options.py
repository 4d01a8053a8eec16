"""From the words of a command line to the arguments of the API."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from union.sandbox.constants import PYPI_HOSTS
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    import argparse

    from union.sandbox._session.session import Session

__all__ = ["open_session", "run_arguments"]


def open_session(options: argparse.Namespace) -> Session:
    """The session that the options describe."""
    from union.sandbox import on_device

    given: dict[str, Any] = {
        "host_work_dir": _absolute(options.work_dir),
        "read_only_paths": [_absolute(path) for path in options.read_only],
        "read_write_paths": [_absolute(path) for path in options.read_write],
        "resources": _resources(options),
        "strict": options.strict,
        "network_denylist": options.deny or None,
        "warm": False,  # there is one command, and none after it
        **_network(options),
    }
    if options.backend is not None:
        given["backend"] = options.backend
    return on_device.session(**given)


def run_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``run()`` that every command takes."""
    return {
        "env": dict(_variable(item) for item in options.env),
        "cwd": options.cwd,
        "timeout_s": options.timeout,
    }


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path)


def _network(options: argparse.Namespace) -> dict[str, Any]:
    allowed = [*options.allow, *(PYPI_HOSTS if options.allow_pypi else ())]
    mode = options.network or ("allowlist" if allowed else "blocked")
    if allowed and mode != "allowlist":
        raise SandboxUsageError(
            f"--allow and --allow-pypi need --network allowlist, not {mode}",
            argument="--allow",
            hint="leave --network out: they imply it",
        )
    if mode == "allowlist" and not allowed:
        raise SandboxUsageError(
            "--network allowlist needs something that is allowed",
            argument="--network",
            hint="add --allow HOST or --allow-pypi",
        )
    return {"network_mode": mode, "network_allowlist": allowed or None}


def _resources(options: argparse.Namespace) -> object:
    if options.memory is None and options.cpus is None:
        return None
    from union.sandbox import Resources

    return Resources(memory=options.memory, cpu=options.cpus)


def _variable(item: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if equals:
        return name, value
    if name not in os.environ:
        raise SandboxUsageError(
            f"--env {name}: there is no such variable to pass on",
            argument="--env",
            hint=f"--env {name}=VALUE sets one",
        )
    return name, os.environ[name]
