"""Credentials of a ``SandboxEnvironment``: named here, read from the platform's secrets in the pod.

A description holds the name of a variable, never a value, so it may be part of a deployment. The
process that starts the server reads the variable, and the server gets the value on its stdin.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._policy.stored_secrets import parse_stored
from union.sandbox.errors import PolicyError, SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["check_credentials", "read_credentials", "variables_of"]

Credentials = dict[str, dict[str, Any]]
_ARGUMENT: Final = "credentials"
_SHAPE: Final = "sk-0123456789abcdef"
"""Stands for the value while a description is checked."""


def check_credentials(credentials: object, known: Iterable[str]) -> Credentials:
    """Check the descriptions of an environment.

    Args:
        credentials: for each name, the fields of a stored secret, with ``variable`` for ``value``.
        known: the variables that hold secrets of the environment.

    Raises:
        SandboxUsageError: a description is invalid, or names a variable that holds no secret.

    """
    if not isinstance(credentials, dict):
        raise SandboxUsageError(
            f"credentials must be a dict, got {type(credentials).__name__}", argument=_ARGUMENT
        )
    accepted = frozenset(known)
    for name, fields in credentials.items():
        variable = fields.get("variable") if isinstance(fields, dict) else None
        if not isinstance(variable, str) or variable not in accepted:
            raise SandboxUsageError(
                f"credentials: {name!r:.100} must name the variable of one of the secrets of the "
                f"environment, got {variable!r:.100}",
                argument=_ARGUMENT,
                hint=f"secrets hold: {', '.join(sorted(accepted)) or 'none'}; add "
                "flyte.Secret(key=..., as_env_var=...) to secrets",
            )
    _parse({name: _with_value(fields, _SHAPE) for name, fields in credentials.items()})
    return {str(name): dict(fields) for name, fields in credentials.items()}


def variables_of(credentials: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    """Return the variables that hold the values; commands do not see them."""
    return frozenset(str(fields["variable"]) for fields in credentials.values())


def read_credentials(credentials: Mapping[str, Mapping[str, Any]]) -> Credentials:
    """Return the descriptions with the values, read from the variables of this process.

    Raises:
        SandboxUsageError: code ``secret-missing``; a variable is not set.

    """
    found = {}
    for name, fields in credentials.items():
        variable = str(fields["variable"])
        value = os.environ.get(variable)
        if not value:
            raise SandboxUsageError(
                f"credentials: the variable {variable} of {name!r:.100} is not set",
                argument=_ARGUMENT,
                code="secret-missing",
                hint="create the secret on the platform (flyte create secret), or set the variable "
                "where the sandbox is a process of this machine",
            )
        found[name] = _with_value(fields, value)
    _parse(found)
    return found


def _with_value(fields: Mapping[str, Any], value: str) -> dict[str, Any]:
    return {key: kept for key, kept in fields.items() if key != "variable"} | {"value": value}


def _parse(table: Credentials) -> None:
    try:
        parse_stored(table, argument=_ARGUMENT)
    except PolicyError as exc:
        raise SandboxUsageError(exc.args[0], argument=_ARGUMENT, hint=exc.hint) from None
