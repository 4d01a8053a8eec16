"""Write the type stubs of ``union.sandbox.sync`` from the asynchronous API: ``--check`` compares.

At run time, ``union.sandbox.sync`` makes its classes from the asynchronous ones. Type checkers and
editors need the same as text. This program finds every class that has a face, follows the
annotations from the public functions on, and writes the signatures without ``async``.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import subprocess
import sys
from collections.abc import Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "union" / "sandbox" / "sync"
HEAD = '''"""{doc}.

Written by scripts/sync_stubs.py from the asynchronous API; do not edit.
"""
'''
SUBMODULES = ("on_device", "remote")
ALIASES = {
    "AsyncIterator": ("collections.abc", "Iterator"),
    "AsyncIterable": ("collections.abc", "Iterable"),
    "AsyncGenerator": ("collections.abc", "Generator"),
    "AbstractAsyncContextManager": ("contextlib", "AbstractContextManager"),
}
EXIT = """def __exit__(self, kind: type[BaseException] | None,
        exc: BaseException | None, traceback: TracebackType | None) -> None: ..."""
AWAITED = {"Awaitable", "Coroutine"}


class Module:
    """The source of one asynchronous module, with the origin of every name in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.module = importlib.import_module(name)
        self.tree = ast.parse(Path(inspect.getsourcefile(self.module) or "").read_text("utf-8"))
        self.imports: dict[str, tuple[str, str | None]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = (node.module, alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = (alias.name, None)

    def define(self, name: str) -> ast.AST:
        """Return the top-level definition of a class or function."""
        for node in self.tree.body:
            if getattr(node, "name", None) == name:
                return node
        raise LookupError(f"{self.name} does not define {name}")

    def origin(self, name: str) -> tuple[str, str | None]:
        """Return the module and the name that a stub imports for ``name``."""
        return self.imports.get(name, (self.name, name))

    def value(self, name: str) -> Any:
        """Return the object that a name stands for; None for one that only checkers know."""
        module, attribute = self.origin(name)
        found = importlib.import_module(module)
        return found if attribute is None else getattr(found, attribute, None)


class Stubs:
    """The stubs: classes with a face in the package, functions in its submodules."""

    def __init__(self) -> None:
        from union import sandbox
        from union.sandbox.sync import _faces

        self.faces = _faces
        self.sandbox = sandbox
        self.modules: dict[str, Module] = {}
        self.classes: dict[type, str] = {}
        """The text of each face, by its asynchronous class."""
        self.waiting: list[type] = []
        self.imports: dict[str, tuple[str, str | None]] = {}

    def module(self, name: str) -> Module:
        """Return the source of a module; read it once."""
        if name not in self.modules:
            self.modules[name] = Module(name)
        return self.modules[name]

    # Annotations.

    def annotation(self, node: ast.expr | None, home: Module) -> str:
        """Return an annotation for the stub, and remember what it needs."""
        if node is None:
            return "Any"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        return ast.unparse(_Plain(self, home).visit(node))

    def need(self, name: str, home: Module) -> str:
        """Import a name into the stub, or add its face; return its name there."""
        if hasattr(builtins, name):
            return name
        if name in ALIASES:
            self.imports[ALIASES[name][1]] = ALIASES[name][0], ALIASES[name][1]
            return ALIASES[name][1]
        value = home.value(name)
        if inspect.isclass(value) and self.faces.has_face(value):
            self.add_class(value)
            return value.__name__
        self.imports[name] = home.origin(name)
        return name

    # Definitions.

    def add_class(self, cls: type) -> None:
        """Write the face of a class, unless it is written or waiting."""
        if cls not in self.classes:
            self.classes[cls] = ""
            self.waiting.append(cls)

    def finish_classes(self) -> None:
        """Write every class that waits, and those that it needs."""
        while self.waiting:
            cls = self.waiting.pop(0)
            self.classes[cls] = self.class_text(cls)

    def home_of(self, value: Any) -> Module:
        """Return the module that defines a class or function; ``__module__`` is the public one."""
        name = inspect.unwrap(value) if inspect.isfunction(value) else value
        file = inspect.getsourcefile(name)
        for module in tuple(sys.modules.values()):
            if getattr(module, "__file__", None) == file:
                return self.module(module.__name__)
        raise LookupError(f"{value!r} has no source")

    def class_text(self, cls: type) -> str:
        """Return the stub of one face."""
        home = _home_of_class(self, cls)
        node = home.define(cls.__name__)
        assert isinstance(node, ast.ClassDef)
        bases = [base for base in cls.__bases__ if self.faces.has_face(base)]
        for base in bases:
            self.add_class(base)
        names = ", ".join(base.__name__ for base in bases)
        lines = [f"class {cls.__name__}({names}):" if names else f"class {cls.__name__}:"]
        if cls.__name__ not in self.sandbox.__all__:
            self.imports["type_check_only"] = "typing", "type_check_only"
            lines.insert(0, "@type_check_only")
        lines += _summary(node)
        plain = [
            base
            for base in cls.__mro__[1:]
            if base.__module__.startswith("union.sandbox")
            and not any(issubclass(b, base) for b in bases)
        ]
        for source in (*reversed(plain), cls):
            own = _home_of_class(self, source)
            body = own.define(source.__name__)
            assert isinstance(body, ast.ClassDef)
            for member in body.body:
                lines += self.member(member, own)
        if any("__aenter__" in vars(base) for base in (cls, *plain)):
            self.imports["TracebackType"] = "types", "TracebackType"
            self.imports["Self"] = "typing", "Self"
            lines += [f"    def __enter__(self) -> {self.entered(node, home)}: ..."]
            lines.append(f"    {EXIT}")
        if len(lines) == 1:
            lines.append("    ...")
        return "\n".join(lines)

    def entered(self, node: ast.ClassDef, home: Module) -> str:
        """Return the type that ``with`` gives."""
        for member in node.body:
            if isinstance(member, ast.AsyncFunctionDef) and member.name == "__aenter__":
                return self.annotation(member.returns, home)
        return "Self"

    def member(self, node: ast.stmt, home: Module) -> list[str]:
        """Return the lines of one member of a class."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name in {"__aiter__", "__anext__"}:
                name = {"__aiter__": "__iter__", "__anext__": "__next__"}[node.name]
                return [f"    def {name}(self) -> {self.annotation(node.returns, home)}: ..."]
            if node.name == "__init__":
                return self.attributes(node, home)
            if node.name.startswith("_"):
                return []
            decorators = [ast.unparse(found) for found in node.decorator_list]
            if any(found in {"property", "functools.cached_property"} for found in decorators):
                return self.reader(node.name, node.returns, home, _summary(node))
            text = self.function(node, home)
            return ["    " + line for line in text.splitlines()]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            return [] if name.startswith("_") else self.reader(name, node.annotation, home)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            name = ast.unparse(node.targets[0])
            return [] if name.startswith("_") else [f"    {name} = {node.value.id}"]
        return []

    def attributes(self, node: ast.FunctionDef | ast.AsyncFunctionDef, home: Module) -> list[str]:
        """Return the public attributes that ``__init__`` declares."""
        lines: list[str] = []
        for found in ast.walk(node):
            if isinstance(found, ast.AnnAssign) and isinstance(found.target, ast.Attribute):
                name = found.target.attr
                if not name.startswith("_"):
                    lines += self.reader(name, found.annotation, home)
        return lines

    def reader(
        self, name: str, annotation: ast.expr | None, home: Module, doc: Sequence[str] = ()
    ) -> list[str]:
        """Return the lines of a property."""
        returns = self.annotation(annotation, home)
        lines = ["    @property", f"    def {name}(self) -> {returns}:"]
        return [*lines, *(f"    {line}" for line in doc), "        ..."]

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, home: Module) -> str:
        """Return the signature of a function or method, with the first line of its docstring."""
        arguments = node.args
        for argument in (
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            *filter(None, (arguments.vararg, arguments.kwarg)),
        ):
            if argument.annotation is not None:
                text = self.annotation(argument.annotation, home)
                argument.annotation = ast.parse(text, mode="eval").body
        arguments.defaults = [_default(value) for value in arguments.defaults]
        arguments.kw_defaults = [v and _default(v) for v in arguments.kw_defaults]
        returns = self.annotation(node.returns, home)
        head = f"def {node.name}({ast.unparse(arguments)}) -> {returns}:"
        return "\n".join([head, *_summary(node), "    ..."])

    # Files.

    def start(self, doc: str) -> str:
        """Begin a file; return its docstring."""
        self.imports = {}
        return HEAD.format(doc=doc)

    def import_lines(self, kept: Collection[str] = ()) -> list[str]:
        """Return the imports of the file, but for the names in ``kept``."""
        lines = []
        for name, (module, attribute) in sorted(self.imports.items()):
            if name in kept:
                continue
            if attribute is None:
                lines.append(f"import {module}" + (f" as {name}" if name != module else ""))
            else:
                renamed = f" as {name}" if name != attribute else ""
                lines.append(f"from {module} import {attribute}{renamed}")
        return lines

    def submodule(self, name: str) -> str:
        """Return the stub of a module of functions."""
        module = self.module(f"union.sandbox.{name}")
        head = self.start(module.module.__doc__.partition("\n")[0].rstrip("."))
        functions = [self.function(module.define(f), module) for f in module.module.__all__]  # type: ignore[arg-type]
        faces = sorted({cls.__name__ for cls in self.classes})
        used = [face for face in faces if any(face in text for text in functions)]
        lines = [head, *self.import_lines()]
        lines += [f"from union.sandbox.sync import {face}" for face in used]
        names = ", ".join(repr(found) for found in module.module.__all__)
        return "\n".join([*lines, f"__all__ = [{names}]", *functions, ""])

    def package(self) -> str:
        """Return the stub of the package, with every class."""
        from union.sandbox import sync

        head = self.start("The whole API without await")
        functions = []
        kept: list[str] = []
        for name in sync.__all__:
            if name in {*SUBMODULES, "wrap"}:
                continue
            value = getattr(self.sandbox, name)
            if inspect.isclass(value) and self.faces.has_face(value):
                self.add_class(value)
                if value.__name__ != name:
                    functions.append(f"{name} = {value.__name__}")
            elif inspect.isfunction(value) and value.__module__.startswith("union.sandbox"):
                home = self.home_of(value)
                functions.append(self.function(home.define(value.__name__), home))  # type: ignore[arg-type]
            else:
                kept.append(name)
        self.finish_classes()
        ordered = sorted(self.classes, key=lambda cls: (len(cls.__mro__), cls.__name__))
        self.imports["overload"] = "typing", "overload"
        wraps = []
        for cls in sorted(ordered, key=lambda cls: (-len(cls.__mro__), cls.__name__)):
            if cls.__name__ not in self.sandbox.__all__:
                continue
            wraps += ["@overload", f"def wrap(value: _async.{cls.__name__}) -> {cls.__name__}: ..."]
        names = ", ".join(repr(name) for name in sync.__all__)
        lines = [head, *self.import_lines(kept), "from union import sandbox as _async"]
        lines += [f"from union.sandbox import {name} as {name}" for name in kept]
        lines += [f"from union.sandbox.sync import {name} as {name}" for name in SUBMODULES]
        lines.append(f"__all__ = [{names}]")
        lines += [self.classes[cls] for cls in ordered]
        return "\n".join([*lines, *functions, *wraps, ""])


class _Plain(ast.NodeTransformer):
    """Rewrites the names of one annotation."""

    def __init__(self, stubs: Stubs, home: Module) -> None:
        self.stubs = stubs
        self.home = home

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = None if hasattr(builtins, node.id) else self.home.value(node.id)
        if inspect.isclass(value) and value.__module__.startswith("union.sandbox"):
            result = _awaited(value)
            if result is not None:
                return ast.Name(self.stubs.need(result.__name__, _home_of_class(self.stubs, value)))
        return ast.Name(self.stubs.need(node.id, self.home))

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        top = node.value
        while isinstance(top, ast.Attribute):
            top = top.value
        assert isinstance(top, ast.Name)
        self.stubs.imports[top.id] = self.home.origin(top.id)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if isinstance(node.value, ast.Name):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if node.value.id in AWAITED:
                return self.visit(parts[-1])
            if node.value.id == "AsyncGenerator":
                parts = [*parts, ast.Constant(None)]
                node.slice = ast.Tuple(parts)
            if node.value.id == "Literal":
                self.stubs.need("Literal", self.home)
                return node
        node.value = self.visit(node.value)
        node.slice = self.visit(node.slice)
        return node


def _awaited(cls: type) -> type | None:
    """Return what a class of this package gives when it is awaited, if it is a coroutine."""
    if not issubclass(cls, Coroutine):
        return None
    for base in getattr(cls, "__orig_bases__", ()):
        if getattr(base, "__origin__", None) is Coroutine:
            return base.__args__[-1]
    raise LookupError(f"{cls.__name__} does not say what it returns")


def _home_of_class(stubs: Stubs, cls: type) -> Module:
    for name, value in vars(cls).items():
        if inspect.isfunction(value) and not name.startswith("__dataclass"):
            found = inspect.unwrap(value).__module__
            if found.startswith("union.sandbox."):
                module = stubs.module(found)
                try:
                    module.define(cls.__name__)
                except LookupError:
                    continue
                return module
    return stubs.module(cls.__module__)


def _summary(node: ast.AST) -> list[str]:
    from union.sandbox.sync import _faces

    text = _faces.plain(ast.get_docstring(node) or "").partition("\n")[0]  # type: ignore[arg-type]
    return [f'    """{text}"""'.replace("\\", "\\\\")] if text else []


def _default(node: ast.expr) -> ast.expr:
    return node if isinstance(node, ast.Constant) else ast.Constant(...)


def stubs() -> dict[Path, str]:
    """Return the text of every stub, formatted."""
    made = Stubs()
    texts = {f"{name}.pyi": made.submodule(name) for name in SUBMODULES}
    texts["__init__.pyi"] = made.package()
    return {PACKAGE / name: _formatted(text) for name, text in texts.items()}


def _formatted(text: str) -> str:
    ruff = Path(sys.executable).with_name("ruff")
    for command in (
        ["check", "--fix-only", "--quiet", "--select=I,F401", "--stdin-filename=stub.pyi", "-"],
        ["format", "--quiet", "--stdin-filename=stub.pyi", "-"],
    ):
        done = subprocess.run(
            [ruff, *command], input=text, capture_output=True, text=True, check=True, cwd=ROOT
        )
        text = done.stdout
    return text


def main(arguments: list[str]) -> int:
    """Write the stubs; with ``--check``, return 1 if a file differs."""
    stale = [
        path
        for path, text in stubs().items()
        if not path.exists() or path.read_text("utf-8") != text
    ]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: run python -m scripts.sync_stubs")
        return 1 if stale else 0
    for path, text in stubs().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
