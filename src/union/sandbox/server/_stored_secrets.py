"""The file of ``--secrets``: credentials that clients use by name."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._policy.stored_secrets import parse_stored
from union.sandbox.errors import PolicyError, SandboxUsageError
from union.sandbox.server._secret_files import read_secret

if TYPE_CHECKING:
    from collections.abc import Mapping

    from union.sandbox._policy.stored_secrets import StoredSecret

__all__ = ["read_stored_secrets", "stored_from_launch"]

_ARGUMENT: Final = "--secrets"
_MAX_BYTES: Final = 1024 * 1024


def read_stored_secrets(path: str) -> dict[str, StoredSecret]:
    """Read the credentials of a TOML file, one table for each name.

    A table has the fields of ``parse_stored``. Instead of ``value`` it may have ``value_file``, the
    path of a file with the value, which is checked in the same way.

    Raises:
        SandboxUsageError: The file is malformed, or other users have access to it. The message
            contains no value.

    """
    text = read_secret(_ARGUMENT, path, is_secret=True, max_bytes=_MAX_BYTES, encoding="utf-8")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        # The error of the parser quotes the line, which may hold a value.
        raise SandboxUsageError(
            f"{_ARGUMENT} {path}: it is not valid TOML",
            argument=_ARGUMENT,
            hint='[openai], then host = "api.openai.com" and value = "..." on lines of their own',
        ) from None
    return _parsed({name: _with_value(name, fields) for name, fields in table.items()})


def _with_value(name: str, fields: Any) -> Any:
    if not isinstance(fields, dict) or "value_file" not in fields:
        return fields
    if "value" in fields or not isinstance(fields["value_file"], str):
        raise SandboxUsageError(
            f"{_ARGUMENT}: {name!r:.120} must have either value or value_file, a path",
            argument=_ARGUMENT,
        )
    rest = {key: value for key, value in fields.items() if key != "value_file"}
    value = read_secret(
        _ARGUMENT, fields["value_file"], is_secret=True, max_bytes=32 * 1024, encoding="utf-8"
    )
    return {**rest, "value": value.removesuffix("\n").removesuffix("\r")}


def stored_from_launch(table: Mapping[str, Any]) -> dict[str, StoredSecret]:
    """Return the credentials of a launch document.

    Raises:
        SandboxUsageError: One is invalid. The message contains no value.

    """
    return _parsed(table)


def _parsed(table: Mapping[str, Any]) -> dict[str, StoredSecret]:
    try:
        return parse_stored(table, argument=_ARGUMENT)
    except PolicyError as exc:
        raise SandboxUsageError(exc.args[0], argument=_ARGUMENT, hint=exc.hint) from None
