"""Convert docstrings and signatures to Markdown."""

from __future__ import annotations

import ast
import dataclasses
import html
import inspect
import itertools
import re
import sys
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_WIDTH = 88
_SECTIONS = {
    "Args:": "Arguments:",
    "Returns:": "Returns:",
    "Yields:": "Yields:",
    "Raises:": "Raises:",
}
_ENTRY = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?: (.*)", re.DOTALL)


def prose(docstring: str | None) -> str:
    """Return a docstring as Markdown.

    Examples and literal blocks become fenced blocks, Google-style sections become lists.
    """
    out: list[str] = []
    lines = inspect.cleandoc(docstring or "").splitlines()
    while lines:
        line = lines.pop(0)
        if line.startswith(">>> "):
            block = [line]
            while lines and lines[0].strip():
                block.append(lines.pop(0))
            out += ["```pycon", *block, "```"]
        elif line.strip() == "::":
            block = []
            while lines and (not lines[0].strip() or lines[0].startswith("    ")):
                block.append(lines.pop(0))
            text = textwrap.dedent("\n".join(block)).strip("\n")
            out += ["```text", text, "```", ""]
        elif line in _SECTIONS and lines and lines[0].startswith("    "):
            block = []
            while lines and (not lines[0].strip() or lines[0].startswith("    ")):
                block.append(lines.pop(0))
            out += [_SECTIONS[line], "", *_section(textwrap.dedent("\n".join(block))), ""]
        else:
            out.append(_literals(line))
    return "\n".join(out).strip()


def _literals(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", text)


def _section(text: str) -> list[str]:
    """Return the entries of a Google-style section as list items."""
    entries: list[str] = []
    for line in text.strip("\n").splitlines():
        if not line.strip():
            continue
        if line.startswith(" ") and entries:
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line)
    if not all(_ENTRY.match(entry) for entry in entries):  # Free text, as of a return value.
        return [f"- {_literals(' '.join(entries))}"]
    named = (_ENTRY.fullmatch(entry) for entry in entries)
    return [f"- `{entry[1]}`: {_literals(entry[2])}" for entry in named if entry]


def signature(name: str, function: Callable[..., Any], *, drop_self: bool = False) -> str:
    """Return the call as in a stub file, in a fenced block."""
    declared = inspect.signature(function)
    parameters = list(declared.parameters.values())[1 if drop_self else 0 :]
    arguments: list[str] = []
    keywords = False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            keywords = True
            arguments.append("*")
        keywords = keywords or parameter.kind is parameter.VAR_POSITIONAL
        arguments.append(_parameter(parameter))
    returned = _annotation(declared.return_annotation)
    end = f") -> {returned}" if returned else ")"
    head = f"{'async ' if inspect.iscoroutinefunction(function) else ''}{name}("
    line = f"{head}{', '.join(arguments)}{end}"
    if len(line) > _WIDTH:
        line = "\n".join([head, *(f"    {argument}," for argument in arguments), end])
    return f"```pyi\n{line}\n```"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    text = stars.get(parameter.kind, "") + parameter.name
    annotation = _annotation(parameter.annotation)
    text += f": {annotation}" if annotation else ""
    if parameter.default is not parameter.empty:
        default = repr(parameter.default)
        if parameter.name == "mode":
            default = oct(parameter.default)
        text += f" = {default}" if annotation else f"={default}"
    return text


def _annotation(annotation: Any) -> str:
    if annotation is inspect.Signature.empty or annotation == "None":
        return ""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")


def attribute_docs(body: list[ast.stmt]) -> dict[str, str]:
    """Return the strings that follow assignments, by the assigned name."""
    found = {}
    for statement, following in itertools.pairwise(body):
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        if not isinstance(following, ast.Expr) or not isinstance(following.value, ast.Constant):
            continue
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(following.value.value, str):
                found[target.id] = prose(following.value.value)
    return found


def body_of(cls: type) -> list[ast.stmt]:
    """Return the statements of a class.

    ``inspect`` cannot find them, because the class has the ``__module__`` of its public name.
    """
    for name, module in sorted(sys.modules.items()):
        if name.startswith("union.sandbox") and vars(module).get(cls.__name__) is cls:
            for node in ast.parse(inspect.getsource(module)).body:
                if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
                    return node.body
    raise LookupError(cls)


def code(text: str) -> str:
    """Return text as code in a table cell, with bars escaped."""
    if "|" not in text:
        return f"`{text}`"
    return f"<code>{html.escape(text, quote=False).replace('|', '&#124;')}</code>"


def split_fields(docstring: str | None) -> tuple[str, dict[str, str]]:
    """Return a docstring of a class without its descriptions of fields, and these by name.

    They are entries of a Google-style section, or lines that begin with the name and a colon.
    """
    kept: list[str] = []
    found: dict[str, str] = {}
    names: list[str] = []
    in_section = False
    for line in inspect.cleandoc(docstring or "").splitlines():
        if line in {"Args:", "Attributes:"}:
            in_section, names = True, []
            continue
        in_section = in_section and (not line or line.startswith(" "))
        begun = re.match(r"(?: {4}(\w+)|((?:``\w+``(?: and )?)+)): (.*)", line)
        if begun is not None and (begun[2] or in_section):
            names = re.findall(r"\w+", (begun[1] or begun[2]).replace(" and ", " "))
            found |= dict.fromkeys(names, begun[3])
        elif names and line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            names = []
            kept.append(line)
    return "\n".join(kept), {name: _literals(_sentence(text)) for name, text in found.items()}


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def fields(cls: type) -> str:
    """Return the fields of a dataclass as a table; those of a class of others are not listed."""
    docs = split_fields(cls.__doc__)[1] | attribute_docs(body_of(cls))
    rows = ["| field | type | default | |", "|---|---|---|---|"]
    ours = {
        name
        for part in cls.__mro__
        if part.__module__.startswith("union.")
        for name in inspect.get_annotations(part)
    }
    for field in dataclasses.fields(cls):
        if field.name not in ours or field.name.startswith("_"):
            continue
        default = "" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        if field.default_factory is not dataclasses.MISSING:
            default = f"`{field.default_factory.__name__}()`"
        doc = " ".join(docs.get(field.name, "").split())
        kind = field.type.__name__ if isinstance(field.type, type) else str(field.type)
        rows.append(f"| `{field.name}` | {code(kind)} | {default} | {doc} |")
    return "\n".join(rows)


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class, with those of its private bases."""
    documented = [base for base in cls.__mro__[1:] if not _is_private(base)]
    elsewhere = {part for base in documented for part in base.__mro__}
    for part in (cls, *(part for part in cls.__mro__[1:] if part not in elsewhere)):
        for name, value in vars(part).items():
            if not name.startswith("_") and (
                inspect.isfunction(value) or isinstance(value, property)
            ):
                yield name, value


def _is_private(cls: type) -> bool:
    """Return whether a class is ours and has no entry of its own."""
    return cls.__module__.startswith("union.sandbox.") and "._" in cls.__module__
