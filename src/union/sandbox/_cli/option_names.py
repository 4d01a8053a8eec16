"""Errors and hints of the API, with the names of command-line options."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["in_options"]

_VALUE: Final = r"""=(?:'([^']*)'|"([^"]*)")"""
_OPTIONS: Final = {
    "backend": "--backend",
    "cwd": "--cwd",
    "host_work_dir": "--work-dir",
    "network_allowlist": "--allow",
    "network_denylist": "--deny",
    "network_mode": "--network",
    "persist": "--persist",
    "read_only_paths": "--read-only",
    "read_write_paths": "--read-write",
    "timeout_s": "--timeout",
}
_NAMES: Final = re.compile(rf"(?<![\w.-])({'|'.join(_OPTIONS)})(?:{_VALUE})?(?![\w(])")
_PHRASES: Final = (
    ("network_allowlist=sb.PYPI_HOSTS", "--allow-pypi"),
    ("network_allowlist=PYPI_HOSTS", "--allow-pypi"),
    ("resources: memory", "--memory"),
    ("resources: cpu", "--cpus"),
    ("resources.memory", "--memory"),
    ("strict=True", "--strict"),
)


def in_options(text: str) -> str:
    """Return a message with the options of ``sbx`` in place of arguments of the API.

    >>> in_options("use backend='userns', or leave timeout_s out")
    'use --backend userns, or leave --timeout out'
    """
    for phrase, option in _PHRASES:
        text = text.replace(phrase, option)

    def named(found: re.Match[str]) -> str:
        value = found[2] or found[3]
        return f"{_OPTIONS[found[1]]} {value}" if value else _OPTIONS[found[1]]

    return _NAMES.sub(named, text)
