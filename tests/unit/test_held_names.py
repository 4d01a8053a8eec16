"""Names that are compared with how they were, and the descriptors that this needs."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from union.sandbox._linux import held_names
from union.sandbox._linux.tree import WorkTree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMES = ("a", "a/b", "a/b/file", "a/link", "top")


def _open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("one")
    (tmp_path / "a" / "link").symlink_to("b")
    (tmp_path / "top").write_text("one")
    return tmp_path


@pytest.fixture
def tree(work: Path) -> Iterator[WorkTree]:
    before = _open_files()
    tree = WorkTree(str(work))
    yield tree
    tree.close()
    assert _open_files() == before


def _touch(path: Path) -> None:
    path.write_text("two")


@pytest.mark.parametrize(
    "name", ["a/b/file", "top", "a/b/new", "a/new"], ids=["file", "top", "new deep", "new"]
)
def test_a_change_of_content_or_of_a_directory_is_noticed(
    tree: WorkTree, work: Path, name: str
) -> None:
    held = tree.hold(NAMES)
    assert held is not None
    assert held.is_unchanged()
    assert held.marks == tree.fingerprint(NAMES)
    _touch(work / name)
    assert not held.is_unchanged()
    again = tree.hold(NAMES)
    assert again is not None
    assert again.is_unchanged()
    assert again.marks != held.marks


@pytest.mark.parametrize("name", ["a", "a/b", "a/b/file", "a/link"])
def test_a_name_that_refers_to_something_else_is_noticed(
    tree: WorkTree, work: Path, name: str
) -> None:
    held = tree.hold(NAMES)
    assert held is not None
    (work / name).rename(work / "moved")
    assert not held.is_unchanged()
    (work / name).symlink_to(work / "moved")
    assert not held.is_unchanged(), "a link to the same directory is not that directory"


def test_nothing_below_a_changed_directory_is_looked_up(
    tree: WorkTree, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tree.hold(NAMES)
    assert held is not None
    looked: list[str] = []
    original = os.lstat

    def counted(name: str, **options: object) -> os.stat_result:
        looked.append(name)
        return original(name, **options)  # type: ignore[arg-type]  # of the caller

    monkeypatch.setattr(held_names.os, "lstat", counted)
    assert held.is_unchanged()
    assert len(looked) == len(NAMES)
    looked.clear()
    (work / "a").rename(work / "other")
    (work / "a").symlink_to("other")
    assert not held.is_unchanged()
    assert looked == ["a"]


def test_closing_the_tree_closes_the_directories(tree: WorkTree) -> None:
    held = tree.hold(NAMES)
    assert held is not None
    tree.close()
    assert not held.is_unchanged()
    held.close()


def test_released_names_are_closed(tree: WorkTree) -> None:
    before = _open_files()
    held = tree.hold(NAMES)
    assert held is not None
    assert len(_open_files()) == len(before) + 2, "a and a/b"
    tree.release(held)
    assert _open_files() == before
    assert not held.is_unchanged()
    assert tree.hold(("missing",)) is None
    assert tree.hold(("a/b/file/below",)) is None
    assert _open_files() == before


def test_closing_waits_for_a_look_in_another_thread(
    tree: WorkTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that is closed too early may belong to another file when it is used."""
    held = tree.hold(NAMES)
    assert held is not None
    inside, go_on = threading.Event(), threading.Event()
    original = os.lstat
    results: list[bool] = []

    def slow(name: str, **options: object) -> os.stat_result:
        inside.set()
        go_on.wait(30)
        return original(name, **options)  # type: ignore[arg-type]  # of the caller

    monkeypatch.setattr(held_names.os, "lstat", slow)
    looking = threading.Thread(target=lambda: results.append(held.is_unchanged()))
    looking.start()
    assert inside.wait(30)
    closing = threading.Thread(target=tree.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    go_on.set()
    looking.join(30)
    closing.join(30)
    assert results == [True]
