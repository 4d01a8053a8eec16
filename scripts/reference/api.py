"""Write the API page: every public name with its docstring."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from typing import Any

from scripts.reference.docstrings import (
    attribute_docs,
    body_of,
    fields,
    members,
    prose,
    signature,
    split_fields,
)

from union import sandbox as sb

# Groups by topic. Public names that are not listed here follow in a group of their own.
GROUPS = {
    "Open a session": [
        "on_device.session",
        "remote.session",
        "on_device.attach",
        "remote.attach",
        "on_device.available_backends",
        "on_device.default_fs_allowlist",
    ],
    "Cluster sessions": [
        "session",
        "attach",
        "SandboxSession",
        "SandboxEnvironment",
        "DEFAULT_SANDBOX_ENV",
        "DEFAULT_SANDBOX_ENV_BWRAP",
        "base_sandbox_image",
        "image_with_sandbox",
    ],
    "Use a session": ["Session"],
    "Running commands": ["SandboxProcess", "_session.stdin.ProcessStdin"],
    "Results": [
        "ExecResult",
        "Usage",
        "_policy.decision.Decision",
        "Isolation",
        "FileInfo",
        "Transfer",
        "Skipped",
    ],
    "Credentials": [
        "Http",
        "Secret",
        "Bearer",
        "Header",
        "Basic",
        "Query",
        "SigV4",
        "HttpRequest",
    ],
    "Limits": ["Resources"],
    "Host features": [
        "doctor",
        "DoctorReport",
        "_core.diagnosis.BackendReport",
        "_core.diagnosis.Attack",
        "_core.diagnosis.Layer",
        "on_device._availability.BackendStatus",
    ],
    "Constants": [
        "PIPE",
        "INHERIT",
        "DEVNULL",
        "STDOUT",
        "constants.Stream",
        "PYPI_HOSTS",
        "CLOUD_METADATA_DENY",
        "KUBERNETES_DENY",
    ],
    "Test kit": [
        "testing.scripted_session",
        "testing.ScriptedTransport",
        "testing.Answer",
        "testing.Call",
        "testing.Answers",
        "testing.Reply",
    ],
}
WITH_CONSTRUCTOR = {"Http", "ScriptedTransport", "Secret"}
MODULES = {"constants", "errors", "on_device", "remote"}

INTRO = """\
# API

<!-- Written by `make docs` from the docstrings. -->

All public names with their docstrings. Names without a module belong to `union.sandbox`:
`from union import sandbox as sb`. [Errors](errors.md) have a separate page.
"""


def find(path: str) -> Any:
    """Return the object of a dotted name below ``union.sandbox``, or None."""
    module, _, name = path.rpartition(".")
    if not module:
        return getattr(sb, name, None)
    return getattr(importlib.import_module(f"union.sandbox.{module}"), name, None)


def shown(path: str) -> str:
    """Return the name to show, without private modules."""
    return path.rpartition(".")[2] if "_" in {part[0] for part in path.split(".")} else path


def constant(name: str) -> str:
    """Return the docstring below the definition of a constant."""
    for module in ("constants", "testing", "cluster._image", "cluster._environment"):
        source = inspect.getsource(importlib.import_module(f"union.sandbox.{module}"))
        body = ast.parse(source).body
        # Names that are created on first use are declared for type checkers only.
        body += [line for part in body if isinstance(part, ast.If) for line in part.body]
        if name in (docs := attribute_docs(body)):
            return docs[name]
    return ""


def render(name: str, value: Any) -> str:
    """Return the entry of one name."""
    parts = [f"### {name}"]
    last = name.rpartition(".")[2]
    if inspect.isclass(value):
        is_table = dataclasses.is_dataclass(value)
        parts.append(prose(split_fields(value.__doc__)[0] if is_table else value.__doc__))
        if last in WITH_CONSTRUCTOR:
            parts.append(signature(name, value.__init__, drop_self=True))
        if is_table:
            parts.append(fields(value))
        parts += [member(last, *item, cls=value) for item in members(value)]
        attributes = attribute_docs(body_of(value))
        if not is_table:
            parts += [f"#### {last}.{n}\n\n{doc}" for n, doc in attributes.items()]
    elif inspect.isroutine(value):
        parts += [signature(name, value), prose(value.__doc__)]
    else:
        parts.append(constant(last))
    return "\n\n".join(filter(None, parts))


def member(owner: str, name: str, value: Any, *, cls: type) -> str:
    """Return the entry of a method or a property."""
    head = f"#### {owner}.{name}"
    if isinstance(value, property):
        original = value.fget.__name__ if value.fget else name
        if original != name and vars(cls).get(original) is value:
            return f"{head}\n\nThe same as `{original}`."
        kind = inspect.signature(value.fget).return_annotation if value.fget else ""
        return f"{head}\n\n```pyi\n{name}: {kind}\n```\n\n{prose(value.__doc__)}"
    return "\n\n".join([head, signature(name, value, drop_self=True), prose(value.__doc__)])


def page() -> str:
    """Return the whole page."""
    listed = {path for paths in GROUPS.values() for path in paths}
    aliases, more = [], []
    for name in sorted(sb.__all__):
        value = getattr(sb, name)
        if name in MODULES or name in listed or _is_error(value):
            continue
        proper = getattr(value, "__name__", name) if inspect.isclass(value) else name
        (aliases if proper != name and proper in sb.__all__ else more).append(name)
    groups = {**GROUPS, "Further names": more}
    parts = [INTRO]
    for title, paths in groups.items():
        entries = [render(shown(p), found) for p in paths if (found := find(p)) is not None]
        if entries:
            parts.append("\n\n".join([f"## {title}", *entries]) + "\n")
    if aliases:
        lines = [f"- `{name}` is an alias of `{getattr(sb, name).__name__}`." for name in aliases]
        parts.append("\n".join(["## Aliases", "", *lines, ""]))
    return "\n".join(parts)


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, sb.SandboxError)
