"""The page about every public name."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from typing import Any

from scripts.reference.docstrings import attribute_docs, body_of, fields, members, prose, signature

from union import sandbox as sb

# Where a reader looks for it. What is public and not named here comes last, by itself.
GROUPS = {
    "Open a session": [
        "on_device.session",
        "remote.session",
        "on_device.available_backends",
        "on_device.default_fs_allowlist",
    ],
    "On a cluster": [
        "session",
        "SandboxSession",
        "SandboxEnvironment",
        "DEFAULT_SANDBOX_ENV",
        "DEFAULT_SANDBOX_ENV_BWRAP",
        "base_sandbox_image",
    ],
    "Use a session": ["Session"],
    "A command that runs": ["SandboxProcess", "_session.process.ProcessStdin"],
    "What comes back": [
        "ExecResult",
        "Usage",
        "_policy.decision.Decision",
        "Isolation",
        "FileInfo",
        "Transfer",
        "Skipped",
    ],
    "Limits": ["Resources"],
    "This machine": [
        "doctor",
        "DoctorReport",
        "_core.diagnosis.BackendReport",
        "_core.diagnosis.Attack",
        "_core.diagnosis.Layer",
        "on_device._availability.BackendStatus",
    ],
    "Names to pass": [
        "PIPE",
        "INHERIT",
        "DEVNULL",
        "constants.Stream",
        "PYPI_HOSTS",
        "CLOUD_METADATA_DENY",
    ],
    "For your tests": [
        "testing.scripted_session",
        "testing.ScriptedTransport",
        "testing.Answer",
        "testing.Call",
        "testing.Answers",
        "testing.Reply",
    ],
}
WITH_CONSTRUCTOR = {"ScriptedTransport"}
MODULES = {"constants", "errors", "on_device", "remote"}

INTRO = """\
# API

<!-- Written by `make docs` from the docstrings. -->

Everything public, from its own docstring. Names without a module are those of `union.sandbox`:
`from union import sandbox as sb`. Errors have [a page of their own](errors.md).
"""


def find(path: str) -> Any:
    """Return what a dotted name below ``union.sandbox`` stands for; None if it is not there."""
    module, _, name = path.rpartition(".")
    if not module:
        return getattr(sb, name, None)
    return getattr(importlib.import_module(f"union.sandbox.{module}"), name, None)


def shown(path: str) -> str:
    """Return the name to show: where a private module is, is nobody's business."""
    return path.rpartition(".")[2] if "_" in {word[0] for word in path.split(".")} else path


def constant(name: str) -> str:
    """Return what is written below a constant where it is defined."""
    for module in ("constants", "testing", "cluster._image", "cluster._environment"):
        source = inspect.getsource(importlib.import_module(f"union.sandbox.{module}"))
        body = ast.parse(source).body
        # What is made when it is first asked for is declared for type checkers only.
        body += [line for part in body if isinstance(part, ast.If) for line in part.body]
        if name in (docs := attribute_docs(body)):
            return docs[name]
    return ""


def render(name: str, value: Any) -> str:
    """Return the entry of one name."""
    parts = [f"### {name}"]
    last = name.rpartition(".")[2]
    if inspect.isclass(value):
        parts.append(prose(value.__doc__))
        if last in WITH_CONSTRUCTOR:
            parts.append(signature(name, value.__init__, drop_self=True))
        if dataclasses.is_dataclass(value):
            parts.append(fields(value))
        parts += [member(last, *item, cls=value) for item in members(value)]
        attributes = attribute_docs(body_of(value))
        if not dataclasses.is_dataclass(value):
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
    told = {path for paths in GROUPS.values() for path in paths}
    aliases, more = [], []
    for name in sorted(sb.__all__):
        value = getattr(sb, name)
        if name in MODULES or name in told or _is_error(value):
            continue
        proper = getattr(value, "__name__", name) if inspect.isclass(value) else name
        (aliases if proper != name and proper in sb.__all__ else more).append(name)
    groups = {**GROUPS, "More": more}
    parts = [INTRO]
    for title, paths in groups.items():
        entries = [render(shown(p), found) for p in paths if (found := find(p)) is not None]
        if entries:
            parts.append("\n\n".join([f"## {title}", *entries]) + "\n")
    if aliases:
        lines = [f"- `{name}` is `{getattr(sb, name).__name__}`." for name in aliases]
        parts.append("\n".join(["## Other spellings", "", *lines, ""]))
    return "\n".join(parts)


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, sb.SandboxError)
