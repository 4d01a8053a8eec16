"""``sbx cp``: targets, progress, and skipped entries."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Self

import pytest
from tests.conftest import ISOLATED

from union.sandbox._cli import copy
from union.sandbox._cli.main import main
from union.sandbox._core.file_errors import SandboxFileNotFoundError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.spec("H")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a work dir, a tree, a file, and a link that leads out."""
    for name in ("work", "tree/sub", "there"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file").write_text("one")
    (tmp_path / "tree/sub/deep").write_text("two")
    (tmp_path / "tree/link").symlink_to("/etc/passwd")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cp(*words: str) -> int:
    return main(["cp", "--backend", ISOLATED[0], "--work-dir", "work", *words])


@pytest.mark.parametrize("words", [("a", "b"), (":a", ":b")])
def test_one_side_is_in_the_work_dir(
    words: tuple[str, str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cp(*words) == 2
    assert "must begin with a colon" in capsys.readouterr().err


@dataclasses.dataclass
class Done:
    files: int = 1
    bytes: int = 3 * 1024 * 1024
    skipped: tuple[object, ...] = ()


class Recorder:
    """A stand-in for a session: records the target of a copy and reports progress."""

    def __init__(self, dirs: set[str]) -> None:
        self.dirs = dirs
        self.calls: list[tuple[str, str, str]] = []
        self.limits: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def stat(self, path: str) -> object:
        class Found:
            kind = "dir" if path in self.dirs else "file"

        return Found

    async def _move(self, kind: str, source: str, target: str, progress: object) -> Done:
        self.calls.append((kind, os.path.relpath(source), os.path.relpath(target)))
        if callable(progress):
            progress(0, None, "")
            progress(1024, 2048, "a\x1b[2Jb")
        return Done()

    async def upload(self, local: str, path: str, *, progress: object, **limits: int) -> Done:
        self.limits = limits
        return await self._move("in", local, path, progress)

    async def download(self, path: str, local: str, *, progress: object, **limits: int) -> Done:
        self.limits = limits
        return await self._move("out", path, local, progress)


@pytest.mark.parametrize(
    "words, call",
    [
        (("file", ":"), ("in", "file", "file")),
        (("file", ":new"), ("in", "file", "new")),
        (("file", ":new/"), ("in", "file", "new/file")),
        (("file", ":dir"), ("in", "file", "dir/file")),
        (("tree", ":"), ("in", "tree", ".")),
        (("tree", ":dir"), ("in", "tree", "dir")),
        ((":dir/x", "."), ("out", "dir/x", "x")),
        ((":dir/x", "there"), ("out", "dir/x", "there/x")),
        ((":dir/x", "new"), ("out", "dir/x", "new")),
        ((":dir", "there"), ("out", "dir", "there")),
        ((":", "there"), ("out", ".", "there")),
    ],
)
def test_the_target_of_a_directory_and_of_a_file(
    words: tuple[str, str],
    call: tuple[str, str, str],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = Recorder({".", "dir"})
    monkeypatch.setattr(copy, "_session", lambda _: session)
    assert cp(*words) == 0
    assert session.calls == [call]
    assert session.limits["max_bytes"] > 2**40
    assert capsys.readouterr() == ("", ""), "no progress without a terminal"


def test_progress_on_a_terminal_contains_no_escape_sequence_of_a_name(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(copy, "_session", lambda _: Recorder({"."}))
    monkeypatch.setattr(copy, "_REFRESH_S", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert cp("file", ":") == 0
    shown = capsys.readouterr().err.split("\r\x1b[K")
    assert shown[-2:] == [r" 50 %  1.0 KiB  a\x1b[2Jb", "1 file, 3.0 MiB\n"]
    assert cp("--quiet", "file", ":") == 0
    assert capsys.readouterr().err == ""


def test_an_error_during_the_copy_starts_on_its_own_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(Recorder):
        async def _move(self, kind: str, source: str, target: str, progress: object) -> Done:
            await super()._move(kind, source, target, progress)
            raise SandboxFileNotFoundError("it is gone")

    monkeypatch.setattr(copy, "_session", lambda _: Failing({"."}))
    monkeypatch.setattr(copy, "_REFRESH_S", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert cp("file", ":") == 1
    assert capsys.readouterr().err.split("\r\x1b[K")[-1] == "sbx: it is gone\n"


def test_a_tree_goes_in_and_comes_out_again(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cp("tree", ":in") == 0
    assert capsys.readouterr() == ("", "sbx: skipped 'link' (symlink)\n")
    assert (place / "work/in/sub/deep").read_text() == "two"
    assert not (place / "work/in/link").is_symlink()
    (place / "work/in/trap").symlink_to("/etc/passwd")
    assert cp(":in", "out") == 0
    assert "'trap' (symlink)" in capsys.readouterr().err
    assert sorted(os.listdir("out")) == ["sub"]
    assert (place / "out/sub/deep").read_text() == "two"
    assert cp(":nothing", "out") == 1
    assert "nothing" in capsys.readouterr().err
