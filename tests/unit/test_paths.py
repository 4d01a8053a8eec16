from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from union.sandbox._core.file_errors import SandboxPathError
from union.sandbox._core.files import FileInfo
from union.sandbox._core.paths import shown_path, work_path
from union.sandbox.errors import SandboxUsageError

WORK = "/w/dir"


class Spelled:
    def __init__(self, value):
        self.value = value

    def __fspath__(self):
        return self.value


@pytest.mark.parametrize(
    "path,expected",
    [
        ("a", "a"),
        ("a/b.txt", "a/b.txt"),
        ("/w/dir/a", "a"),
        ("//w///dir//a/./b/", "a/b"),
        ("./a//b/.", "a/b"),
        ("..a/...", "..a/..."),
        ("%2e%2e/x", "%2e%2e/x"),
        ("-rf", "-rf"),
        ("new\nline", "new\nline"),
        (b"bad\xff", "bad\udcff"),
        ("w/dir/a", "w/dir/a"),
        (PurePosixPath("p/q"), "p/q"),
        (Spelled("s"), "s"),
        (Spelled(b"s\xfe"), "s\udcfe"),
        ("x" * 255, "x" * 255),
    ],
)
def test_paths_in_the_work_dir_come_back_relative(path, expected):
    assert work_path(path, work_dir=WORK) == expected


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "../x",
        "a/../../x",
        "a/..",
        "/w/dir/../x",
        "/w/dir/..",
        "/w/dir2",
        "/w/dir2/x",
        "/w",
        "/",
        "//",
        "/etc/passwd",
        "./..//x",
        b"../x",
        PurePosixPath("../x"),
    ],
)
def test_paths_outside_are_refused_as_permission_errors(path):
    with pytest.raises(SandboxPathError, match="work dir") as info:
        work_path(path, work_dir=WORK, argument="target", allow_root=True)
    assert isinstance(info.value, PermissionError)
    assert isinstance(info.value, SandboxUsageError)
    assert info.value.code == "path-outside"
    assert info.value.argument == "target"


@pytest.mark.parametrize(
    "path,code",
    [
        ("", "path-empty"),
        (b"", "path-empty"),
        ("a\0b", "path-nul"),
        ("x" * 256, "path-too-long"),
        ("é" * 128, "path-too-long"),
        ("a/" * 2048, "path-too-long"),
        ("\ud800", "path-encoding"),
        (None, "path-type"),
        (3, "path-type"),
        (Spelled(3), "path-type"),
        (bytearray(b"a"), "path-type"),
        (".", "path-is-root"),
        ("/w/dir/", "path-is-root"),
    ],
)
def test_paths_that_no_file_can_have_are_usage_errors(path, code):
    with pytest.raises(SandboxUsageError, match="cwd") as info:
        work_path(path, work_dir=WORK, argument="cwd")
    assert info.value.code == code
    assert info.value.argument == "cwd"


@pytest.mark.parametrize("path", [".", "./", "/w/dir", "/w/dir/", "/w//dir/."])
def test_the_work_dir_itself_only_where_asked_for(path):
    assert work_path(path, work_dir=WORK, allow_root=True) == "."


def test_a_work_dir_with_a_trailing_slash_means_the_same():
    assert work_path("/w/dir/a", work_dir="/w/dir/") == "a"


@given(st.one_of(st.text(alphabet="./ab\0w-\udcff"), st.binary(max_size=40)))
def test_whatever_is_accepted_stays_inside(path):
    try:
        rel = work_path(path, work_dir=WORK, allow_root=True)
    except SandboxUsageError:
        return
    assert not rel.startswith("/")
    assert "\0" not in rel
    assert rel == "." or all(name not in {"", ".", ".."} for name in rel.split("/"))
    assert work_path(rel, work_dir=WORK, allow_root=True) == rel
    assert work_path(f"{WORK}/{rel}", work_dir=WORK, allow_root=True) == rel


def test_a_message_shows_one_printable_line():
    shown = shown_path("a\n\udcff" + "x" * 5000)
    assert shown.isprintable()
    assert shown.isascii()
    assert len(shown) < 200


def test_file_info_has_the_last_component():
    info = FileInfo(path="a/b.txt", kind="file", size=1, mode=0o644, mtime=0.0)
    assert info.name == "b.txt"
