"""Draw which package imports which, and fail on an import cycle.

Run it as ``python -m scripts.import_graph``; it writes docs/architecture/imports.svg. Imports
inside functions count, because they run; imports under ``if TYPE_CHECKING`` do not. The picture
shows the packages, and an arrow only where no longer path of arrows implies it.
"""

from __future__ import annotations

import ast
import graphlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGE = "union.sandbox"
PICTURE = ROOT / "docs" / "architecture" / "imports.svg"
# Every module may import the version, so it shows nothing about the structure.
NOT_DRAWN = frozenset({"_version"})

# The fields of a node that hold statements, and the nodes that can be in them.
_STATEMENTS = ("body", "orelse", "finalbody", "handlers", "cases")
_WITH_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)

Graph = dict[str, set[str]]


def modules(source: Path = SOURCE, package: str = PACKAGE) -> dict[str, Path]:
    """Return the files of a package by module name."""
    found = {}
    for path in sorted(source.joinpath(*package.split(".")).rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def runtime_imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the import statements that can run, at any nesting level."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += node.orelse
        else:
            # No expression holds a statement, and most of a program is expressions.
            waiting += [
                child
                for field in _STATEMENTS
                for child in getattr(node, field, ())
                if isinstance(child, _WITH_STATEMENTS)
            ]


def imported(name: str, path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules of ``known`` that the module ``name`` imports."""
    for node in runtime_imports(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
            continue
        base = node.module or ""
        if node.level:
            # A package is its own first parent; a module is not.
            parents = name.split(".")
            drop = node.level - (path.name == "__init__.py")
            base = ".".join([*parents[: len(parents) - drop], *filter(None, [base])])
        for alias in node.names:
            full = f"{base}.{alias.name}"
            if full in known:
                yield full
            elif base in known:
                yield base


def module_graph(source: Path = SOURCE, package: str = PACKAGE) -> Graph:
    """Return the imports of each module within the package."""
    known = modules(source, package)
    return {name: set(imported(name, path, known)) - {name} for name, path in known.items()}


def cycle(graph: Graph) -> list[str]:
    """Return one import cycle, from a module back to itself; empty if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        # Each element is imported by the one after it; the reader wants the importer first.
        return list(reversed(error.args[1]))
    return []


def package_graph(graph: Graph, package: str = PACKAGE) -> Graph:
    """Return which first-level package or module imports which."""

    def part(name: str) -> str:
        return name.removeprefix(package).lstrip(".").partition(".")[0]

    found: Graph = {}
    for name, targets in graph.items():
        if part(name) and part(name) not in NOT_DRAWN:
            ours = found.setdefault(part(name), set())
            ours |= {part(t) for t in targets} - {"", part(name)} - NOT_DRAWN
    return found


def reduced(graph: Graph) -> Graph:
    """Remove each arrow that a longer path implies; the graph must have no cycle."""
    reach: Graph = {}
    for name in graphlib.TopologicalSorter(graph).static_order():
        targets = graph.get(name, set())
        reach[name] = targets.union(*(reach[target] for target in targets))
    return {
        name: {t for t in targets if not any(t in reach[other] for other in targets - {t})}
        for name, targets in graph.items()
    }


def rows(graph: Graph) -> list[list[str]]:
    """Arrange the packages so that every arrow points down and few of them cross."""
    importers: Graph = {name: set() for name in graph}
    for name, targets in reduced(graph).items():
        for target in targets:
            importers.setdefault(target, set()).add(name)
    depth: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(importers).static_order():
        depth[name] = 1 + max((depth[importer] for importer in importers[name]), default=-1)
    found = [
        sorted(name for name in depth if depth[name] == level)
        for level in range(max(depth.values()) + 1)
    ]
    for _ in range(SWEEPS):
        place = {name: at - len(line) / 2 for line in found for at, name in enumerate(line)}
        near = {name: importers[name] | graph.get(name, set()) for name in importers}
        for line in found:
            line.sort(key=lambda name: (_mean([place[other] for other in near[name]]), name))
    return found


def _mean(places: list[float]) -> float:
    return round(sum(places) / len(places), 6) if places else 0.0


# --- the picture -----------------------------------------------------------------------------

SWEEPS = 4
BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN = 112, 34, 30, 46, 20
STYLE = """\
  <style>
    rect { fill: #f4f6fa; stroke: #5b6b8c; }
    text { font: 14px ui-monospace, monospace; fill: #1c2433; text-anchor: middle; }
    path { fill: none; stroke: #5b6b8c; stroke-width: 1.3; }
    .head { fill: #5b6b8c; stroke: none; }
  </style>
"""


def drawn(graph: Graph) -> str:
    """Return the picture of a graph of packages as SVG."""
    lines = rows(graph)
    most = max(map(len, lines))
    width = 2 * MARGIN + most * BOX_WIDTH + (most - 1) * GAP_X
    height = 2 * MARGIN + len(lines) * BOX_HEIGHT + (len(lines) - 1) * GAP_Y
    place: dict[str, tuple[float, int]] = {}
    for level, line in enumerate(lines):
        taken = len(line) * BOX_WIDTH + (len(line) - 1) * GAP_X
        for column, name in enumerate(line):
            left = (width - taken) / 2 + column * (BOX_WIDTH + GAP_X)
            place[name] = (left, MARGIN + level * (BOX_HEIGHT + GAP_Y))
    shapes = [
        _arrow(place[name], place[target])
        for name, targets in sorted(reduced(graph).items())
        for target in sorted(targets)
    ]
    for name, (x, y) in sorted(place.items()):
        shapes.append(
            f'  <rect x="{x:g}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5"/>\n'
            f'  <text x="{x + BOX_WIDTH / 2:g}" y="{y + 22}">{escape(name)}</text>\n'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">\n'
        f"  <title>Imports between the packages of {PACKAGE}</title>\n"
        f"{STYLE}"
        '  <rect width="100%" height="100%" style="fill: #ffffff; stroke: none"/>\n'
        '  <defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>\n'
        f"{''.join(shapes)}</svg>\n"
    )


def _arrow(begin: tuple[float, int], end: tuple[float, int]) -> str:
    x1, y1 = begin[0] + BOX_WIDTH / 2, begin[1] + BOX_HEIGHT
    x2, y2 = end[0] + BOX_WIDTH / 2, end[1]
    # Straight down past a row it would run behind a box: half-way it is between two columns.
    aside = (BOX_WIDTH + GAP_X) / 2 / 0.75 if x1 == x2 and y2 - y1 > GAP_Y else 0.0
    middle = f"C{x1 + aside:g} {y1 + GAP_Y * 0.7:g} {x2 + aside:g} {y2 - GAP_Y * 0.9:g}"
    return f'  <path marker-end="url(#head)" d="M{x1:g} {y1}{middle} {x2:g} {y2}"/>\n'


def main() -> int:
    """Write the picture; print an import cycle and return 1 if there is one."""
    graph = module_graph()
    for found in (cycle(graph), cycle(package_graph(graph))):
        if found:
            print(f"import cycle: {' -> '.join(found)}", file=sys.stderr)
            return 1
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(drawn(package_graph(graph)), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)}: {len(graph)} modules, no import cycle")
    return 0


if __name__ == "__main__":
    sys.exit(main())
