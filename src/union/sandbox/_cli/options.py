"""Translate command-line options into arguments of the API."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from union.sandbox.constants import PYPI_HOSTS
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    import argparse

    from union.sandbox._policy.http_entries import Http
    from union.sandbox._session.session import Session

__all__ = ["open_session", "run_arguments", "session_arguments", "variables"]


def open_session(options: argparse.Namespace) -> Session:
    """Return the session that the options describe."""
    from union.sandbox import on_device

    # There is only one command, so none is kept ready.
    return on_device.session(**session_arguments(options), warm=False)


def session_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``on_device.session()`` that the options describe."""
    given: dict[str, Any] = {
        "host_work_dir": _absolute(options.work_dir),
        "read_only_paths": [_absolute(path) for path in options.read_only],
        "read_write_paths": [_absolute(path) for path in options.read_write],
        "resources": _resources(options),
        "strict": options.strict,
        "persist": options.persist,
        "network_denylist": options.deny or None,
        **_network(options),
    }
    if options.backend is not None:
        given["backend"] = options.backend
    return given


def variables(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that the options describe."""
    return dict(_variable(item) for item in options.env)


def run_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``run()`` that the options describe."""
    return {
        "env": variables(options),
        "cwd": options.cwd,
        "timeout_s": options.timeout,
    }


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path)


def _network(options: argparse.Namespace) -> dict[str, Any]:
    secrets = [_secret(item) for item in options.secret]
    allowed = [*options.allow, *(PYPI_HOSTS if options.allow_pypi else ()), *secrets]
    mode = options.network or ("allowlist" if allowed else "blocked")
    if allowed and mode != "allowlist":
        raise SandboxUsageError(
            f"--allow, --allow-pypi and --secret need --network allowlist, not --network {mode}",
            argument="--allow",
            hint="leave --network out: they imply it",
        )
    if mode == "allowlist" and not allowed:
        raise SandboxUsageError(
            "--network allowlist needs at least one allowed host",
            argument="--network",
            hint="add --allow HOST or --allow-pypi",
        )
    return {"network_mode": mode, "network_allowlist": allowed or None}


def _secret(item: str) -> Http:
    """Return the entry of ``--secret NAME@HOST``, with settings after commas."""
    from union.sandbox import Basic, Bearer, Header, Http, Query, Secret

    hint = "write --secret NAME@HOST, such as --secret OPENAI_API_KEY@api.openai.com"
    place, *settings = item.split(",")
    name, at, host = place.partition("@")
    if not at or not name or not host:
        raise SandboxUsageError(
            f"--secret {place!r} is not NAME@HOST", argument="--secret", hint=hint
        )
    if not os.environ.get(name):
        raise SandboxUsageError(
            f"--secret {name}: the variable is not set in this environment",
            argument="--secret",
            hint="the value comes from your environment, never from the command line",
        )
    secret = Secret(os.environ[name])
    auth: Bearer | Header | Basic | Query = Bearer(secret)
    rules: list[str] = []
    for setting in settings:
        kind, _, value = setting.partition("=")
        if kind == "allow":
            rules.append(value)
        elif kind in {"header", "basic", "query"}:
            auth = {"header": Header, "basic": Basic, "query": Query}[kind](value, secret)
        else:
            raise SandboxUsageError(
                f"--secret: unknown setting {kind!r}; accepted: header, basic, query, allow",
                argument="--secret",
                hint=hint,
            )
    return Http(host, auth=auth, env=name, allow=rules or None)


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
            f"--env {name}: the variable is not set in this environment",
            argument="--env",
            hint=f"use --env {name}=VALUE to set it",
        )
    return name, os.environ[name]
