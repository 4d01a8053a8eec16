"""There is no import cycle, and the picture of the packages is up to date."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
from scripts import import_graph

if TYPE_CHECKING:
    from pathlib import Path


@functools.cache
def graph() -> import_graph.Graph:
    return import_graph.module_graph()


def written(root: Path, files: dict[str, str]) -> import_graph.Graph:
    for name, text in files.items():
        path = root / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return import_graph.module_graph(root, "own")


def test_no_module_imports_itself_by_way_of_others():
    assert import_graph.cycle(graph()) == []
    assert import_graph.cycle(import_graph.package_graph(graph())) == []


def test_the_picture_is_up_to_date():
    drawn = import_graph.drawn(import_graph.package_graph(graph()))
    shown = import_graph.PICTURE.read_text(encoding="utf-8")
    assert shown == drawn, "run: python -m scripts.import_graph"


def test_the_graph_of_this_package_is_whole():
    packages = import_graph.package_graph(graph())
    assert len(graph()) > 150
    assert {"_core", "_linux", "_session", "on_device", "server"} <= set(packages)
    assert "_core" in packages["_linux"]
    assert packages["errors"] == set()


@pytest.mark.parametrize(
    "text",
    [
        "import own.b",
        "from own import b",
        "from own.b import x",
        "from . import b",
        "from .b import x",
        "def late():\n    from own import b",
        "try:\n    import own.b\nexcept ImportError: ...",
        "if TYPE_CHECKING:\n    import own.c\nelse:\n    import own.b",
    ],
)
def test_every_form_of_import_that_runs_closes_a_circle(tmp_path: Path, text: str):
    graph = written(tmp_path, {"__init__.py": "", "a.py": text, "b.py": "x = 1\nimport own.a"})
    assert set(import_graph.cycle(graph)) == {"own.a", "own.b"}


def test_a_circle_is_named_from_the_importer_on(tmp_path: Path):
    files = {"a.py": "import own.b", "b.py": "import own.c", "c.py": "import own.a"}
    found = import_graph.cycle(written(tmp_path, files))
    assert found[0] == found[-1]
    assert " ".join([*found, *found[1:]]).count("own.a own.b own.c") >= 1


def test_type_checking_imports_close_no_circle(tmp_path: Path):
    text = "if TYPE_CHECKING:\n    import own.b\nif typing.TYPE_CHECKING:\n    from . import b"
    graph = written(tmp_path, {"__init__.py": "", "a.py": text, "b.py": "import own.a"})
    assert graph["own.a"] == set()
    assert import_graph.cycle(graph) == []


def test_an_arrow_that_a_longer_path_implies_is_left_out():
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert import_graph.reduced(graph) == {"a": {"b"}, "b": {"c"}, "c": set()}
    assert import_graph.rows(graph) == [["a"], ["b"], ["c"]]
