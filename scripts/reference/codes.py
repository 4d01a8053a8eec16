"""Write the page about errors: the classes, and every code in the source."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from scripts.reference.docstrings import prose

from union.sandbox import errors
from union.sandbox._core import file_errors
from union.sandbox._core import optional_deps as extras
from union.sandbox.errors import SandboxError

SRC = Path(__file__).resolve().parents[2] / "src" / "union" / "sandbox"
EXECUTION = "SandboxExecutionError"
# Functions and events that result in an error of another class.
MAKERS = {
    "Failed": EXECUTION,
    "_busy": EXECUTION,
    "fail": EXECUTION,
    "not_empty": "SandboxFileError",
    "lost": "SandboxConnectionError",
}

INTRO = """\
# Errors

<!-- Written by `make docs` from the source. -->

Every error is a `SandboxError` with a stable `code` and, where there is a remedy, a `hint`. All
errors can be pickled. Exit codes, timeouts and out-of-memory kills are results. They raise only
with `check=True` or in `run_code()`.

```python
try:
    await sbx.exec(["true", *["x" * 100_000] * 100])
except sb.SandboxExecutionError as error:
    print(error.code, error.stage, error.returncode)
```

```text
too-large spawn -1
```

## Classes
"""


def codes_in(source: str) -> dict[str, set[str]]:
    """Return the error codes in ``source``, with the classes that use them.

    A code that is composed at run time has a ``*`` for its variable part.
    """
    found: dict[str, set[str]] = {}

    def add(value: ast.expr | None, owner: str) -> None:
        if isinstance(value, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "*" for p in value.values)
            found.setdefault("".join(map(str, parts)), set()).add(owner)
        elif isinstance(value, ast.Constant) and isinstance(value.value, str):
            found.setdefault(value.value, set()).add(owner)

    _Finder(add).visit(ast.parse(source))
    return found


class _Finder(ast.NodeVisitor):
    def __init__(self, add) -> None:  # noqa: ANN001 - the function above
        self._add = add
        self._owner = EXECUTION

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self._owner = self._owner, MAKERS.get(node.name, node.name)
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and _named(statement.target):
                self._add(statement.value, self._owner)
        self.generic_visit(node)
        self._owner = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before, self._owner = self._owner, MAKERS.get(node.name, self._owner)
        arguments = node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        pairs = [
            *zip(reversed(positional), reversed(arguments.defaults), strict=False),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ]
        for argument, default in pairs:
            if argument.arg == "code":
                self._add(default, self._owner)
        self.generic_visit(node)
        self._owner = before

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if _named(target):
                self._add(node.value, self._owner)
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for name, value in zip(target.elts, node.value.elts, strict=True):
                    if _named(name):
                        self._add(value, self._owner)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        owner = called if called.endswith("Error") else MAKERS.get(called, self._owner)
        for keyword in node.keywords:
            if keyword.arg == "code":
                self._add(keyword.value, owner)
        if called == "Failed":
            for value in node.args[2:3]:
                self._add(value, owner)
        self.generic_visit(node)


def _named(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id == "code"


def all_codes() -> dict[str, set[str]]:
    """Return every code in the package."""
    found: dict[str, set[str]] = {}
    for path in sorted(SRC.rglob("*.py")):
        for code, owners in codes_in(path.read_text(encoding="utf-8")).items():
            found.setdefault(code, set()).update(owners)
    return found


def anchor(code: str) -> str:
    """Return the anchor of a code on the troubleshooting page."""
    return code.replace("*", "errno")


def classes() -> list[type[SandboxError]]:
    """Return every error class, parents before children."""
    found: list[type[SandboxError]] = []
    for module in (errors, extras, file_errors):
        # By its source: a module also holds what it has loaded from others by now.
        for node in ast.parse(inspect.getsource(module)).body:
            value = getattr(module, node.name) if isinstance(node, ast.ClassDef) else None
            if isinstance(value, type) and issubclass(value, SandboxError):
                found.append(value)
    return found


def page() -> str:
    """Return the whole page."""
    parts = [INTRO]
    for cls in classes():
        parents = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
        parts.append(f"### {cls.__name__}\n")
        parts.append(f"Code `{cls.code}`; subclass of {parents}.\n")
        parts.append(f"{prose(cls.__doc__)}\n")
    parts.append("`errors.ExecutionError` and `errors.CommandError` are aliases.\n")
    parts.append("## Codes\n")
    parts.append("Each code links to its cause and its remedy.\n")
    parts.append("| code | class |\n|---|---|")
    for code, owners in sorted(all_codes().items()):
        shown = ", ".join(f"[{o}](#{o.lower()})" for o in sorted(owners) if re.search("Error$", o))
        link = f"../guides/troubleshooting.md#{anchor(code)}"
        parts.append(f"| [`{code.replace('*', 'ERRNO')}`]({link}) | {shown} |")
    return "\n".join(parts) + "\n"
