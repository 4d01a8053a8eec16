"""The mounts that keep read-only paths in place, and when they must be rebuilt."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from union.sandbox._plan import plan as p
from union.sandbox._plan.rootfs import Shown
from union.sandbox.errors import PolicyError, SandboxExecutionError
from union.sandbox.on_device._read_only import ReadOnlyPaths

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.spec("E4")]


@pytest.fixture
def read_only() -> Iterator[ReadOnlyPaths]:
    made = ReadOnlyPaths()
    yield made
    made.close()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    path = tmp_path / "work"
    (path / "a" / "b" / "ro" / "deeper").mkdir(parents=True)
    (path / "a" / "file").write_text("x")
    return path


def _rw(source: Path, path: str | None = None) -> Shown:
    return Shown(source=str(source), path=path or str(source), writable=True, idmap=3)


def _ro(source: Path) -> Shown:
    return Shown(source=str(source), path=str(source), is_dir=source.is_dir())


def _kinds(shown: list[Shown], top: str) -> dict[str, str]:
    kinds = {}
    for item in shown:
        if item.path.startswith(top):
            kind = "guard" if item.guard else "rw" if item.writable else "ro"
            kinds[item.path.removeprefix(top)] = kind + ("!" if item.verify else "")
    return kinds


def test_every_directory_between_is_a_mount(work: Path, read_only: ReadOnlyPaths) -> None:
    shown = read_only.protect([_ro(work / "a/b/ro"), _rw(work)], strict=False)
    assert _kinds(shown, str(work)) == {
        "": "rw",
        "/a": "guard!",
        "/a/b": "guard!",
        "/a/b/ro": "ro!",
    }
    guard = next(item for item in shown if item.guard)
    assert guard.idmap == 3
    assert guard.bind().existing
    assert guard.identity == ((work / "a").stat().st_dev, (work / "a").stat().st_ino)
    assert read_only.sources == {str(work / "a/b/ro")}
    assert len(read_only.kept) == 3


def test_a_layout_without_such_paths_costs_nothing(work: Path, read_only: ReadOnlyPaths) -> None:
    given = [_rw(work), _ro(work.parent)]
    assert read_only.protect(given, strict=True) == given
    assert read_only.is_intact()
    assert not read_only._fds


@pytest.mark.parametrize("reverse", [False, True])
def test_another_name_of_the_work_dir_is_covered(
    work: Path, read_only: ReadOnlyPaths, *, reverse: bool
) -> None:
    """Nested read-only paths in either order: neither becomes writable for the other's sake."""
    paths = [_ro(work / "a/b"), _ro(work / "a/b/ro/deeper"), _ro(work / "a/file")]
    given = [*(reversed(paths) if reverse else paths), _rw(work, "/alias")]
    shown = read_only.protect(given, strict=False)
    assert _kinds(shown, "/alias") == {"": "rw", "/a": "guard!", "/a/b": "ro!", "/a/file": "ro!"}


def test_a_writable_path_in_a_read_only_one_stays_writable(
    work: Path, read_only: ReadOnlyPaths
) -> None:
    given = [_ro(work / "a"), _rw(work / "a/b/ro"), _rw(work), _ro(work / "a/b/ro/deeper")]
    assert _kinds(read_only.protect(given, strict=False), str(work)) == {
        "": "rw",
        "/a": "ro!",
        "/a/b/ro": "rw",
        "/a/b/ro/deeper": "ro!",
    }


def test_a_path_replaced_before_it_was_opened_is_refused(
    work: Path, read_only: ReadOnlyPaths
) -> None:
    found = (work / "a/b/ro").stat()
    item = Shown(source=f"{work}/a/b/ro", path="/x", identity=(found.st_dev, found.st_ino))
    (work / "a").rename(work / "old")
    (work / "a").symlink_to("old")
    with pytest.raises(SandboxExecutionError, match="was replaced"):
        read_only.protect([item, _rw(work)], strict=False)


def test_strict_accepts_directories_only(work: Path, read_only: ReadOnlyPaths) -> None:
    read_only.protect([_ro(work / "a/b"), _rw(work)], strict=True)
    with pytest.raises(PolicyError, match="strict=True"):
        read_only.protect([_ro(work / "a/file"), _rw(work)], strict=True)


@pytest.mark.parametrize(
    "change, intact",
    [
        ("nothing", True),
        ("write in a directory", True),
        ("write in place", False),
        ("replace", False),
        ("relink", False),
        ("move above", False),
        ("recreate directory", False),
        ("link above", False),
    ],
)
def test_a_replacement_is_detected(
    work: Path, read_only: ReadOnlyPaths, change: str, *, intact: bool
) -> None:
    file, directory = work / "a/file", work / "a/b/ro"
    read_only.protect([_ro(file), _ro(directory), _rw(work)], strict=False)
    os.utime(work, (1, 1))
    if change == "write in a directory":
        (directory / "new").touch()
        (work / "a" / "new").touch()
    elif change == "write in place":
        file.write_text("y")
    elif change == "replace":
        for _ in range(3):
            (work / "new").write_text("y")
            (work / "new").rename(file)
    elif change == "relink":
        os.link(file, work / "name")
        file.unlink()
        os.link(work / "name", file)
    elif change == "move above":
        (work / "a").rename(work / "old")
        (work / "a/b/ro").mkdir(parents=True)
        file.write_text("x")
    elif change == "recreate directory":
        for _ in range(3):
            (directory / "deeper").exists() and (directory / "deeper").rmdir()
            directory.rmdir()
            directory.mkdir()
    elif change == "link above":
        (work / "a").rename(work / "old")
        (work / "a").symlink_to("old")
    assert read_only.is_intact() is intact


def test_the_steps_carry_the_checks() -> None:
    """The encoded plan has the flag of a bind, and the identity that must be mounted."""
    bind = p.Bind("/s", "/t", p.RDONLY, existing=True)
    assert bind.integers()[0] == p.RDONLY | 1 << 63
    assert p.Identity("/t", (1, 2), mounted=True).integers() == (1, 2, 1)
    assert p.Identity("/t", (1, 2)).integers() == (1, 2, 0)
