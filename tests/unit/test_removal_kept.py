"""What is to stay is neither removed nor moved, wherever it is by now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from union.sandbox._linux.tree import WorkTree
from union.sandbox.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.spec("E4")


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[WorkTree]:
    (tmp_path / "top/x/y/kept/below").mkdir(parents=True)
    (tmp_path / "top/x/y/kept/below/file").write_text("stays")
    (tmp_path / "top/x/other/deep").mkdir(parents=True)
    (tmp_path / "top/x/y/kept-file").write_text("stays")
    made = WorkTree(str(tmp_path))
    yield made
    made.close()


def _identities(*paths: Path) -> frozenset[tuple[int, int]]:
    return frozenset((path.stat().st_dev, path.stat().st_ino) for path in paths)


@pytest.mark.threat(131)
def test_a_removal_leaves_what_is_kept_and_says_so(tree: WorkTree, tmp_path: Path) -> None:
    """The rest is removed; without the identities nothing would be left."""
    kept, file = tmp_path / "top/x/y/kept", tmp_path / "top/x/y/kept-file"
    tree.kept = _identities(kept, file, tmp_path / "top/x/y")
    with pytest.raises(SandboxError, match="shown read-only") as caught:
        tree.remove("top", recursive=True)
    assert caught.value.code == "remove-incomplete"
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(path.name for path in left) == ["file", "kept-file"]
    assert {path.read_text() for path in left} == {"stays"}
    assert not list(tmp_path.rglob("other"))
    for path in left:
        assert "kept" in str(path.relative_to(tmp_path))
    tree.kept = frozenset()
    tree.remove("top", recursive=True)
    assert not (tmp_path / "top").exists()


@pytest.mark.threat(131)
@pytest.mark.parametrize("name", ["top/x/y/kept-file", "top/x/y/kept"])
def test_what_is_kept_is_not_removed_by_name(tree: WorkTree, tmp_path: Path, name: str) -> None:
    tree.kept = _identities(tmp_path / name)
    for recursive in (False, True):
        with pytest.raises(SandboxError, match="read-only"):
            tree.remove(name, recursive=recursive)
    assert (tmp_path / name).exists()
    tree.kept = frozenset()
    tree.remove(name, recursive=True)
    assert not (tmp_path / name).exists()
