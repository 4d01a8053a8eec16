"""list_dir, stat, exists, make_dir and remove."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.conftest import host_dir

from union import sandbox as sb

pytestmark = pytest.mark.spec("E3")

# Everything a directory can hold, made by the sandbox itself.
MAKE_ALL_KINDS = """
mkdir -p d/sub; printf 12345 > d/file; chmod 750 d/file; ln -s /etc/hostname d/link
ln -s nowhere d/dangling; mkfifo d/fifo; ln -s sub d/linkdir; : > "d/new
line"; : > "$(printf 'd/raw\\377')"
"""
RAW = b"raw\xff".decode("utf-8", "surrogateescape")


async def make_all_kinds(sbx: sb.Session) -> None:
    made = await sbx.exec(MAKE_ALL_KINDS)
    assert made.ok, made.stderr


async def test_a_directory_is_listed_by_name_with_what_each_entry_is(sbx: sb.Session) -> None:
    await make_all_kinds(sbx)
    found = await sbx.list_dir("d")
    assert [(info.name, info.kind) for info in found] == [
        ("dangling", "symlink"),
        ("fifo", "other"),
        ("file", "file"),
        ("link", "symlink"),
        ("linkdir", "symlink"),
        ("new\nline", "file"),
        (RAW, "file"),
        ("sub", "dir"),
    ]
    assert [info.path for info in found] == [f"d/{info.name}" for info in found]
    assert found == await sbx.list_dir(f"{sbx.work_dir}/d/") == await sbx.list_dir(Path("d"))  # type: ignore[arg-type]
    assert await sbx.list_dir("d/sub") == ()
    for info in found:
        assert await sbx.stat(info.path) == info


async def test_the_description_of_a_file(sbx: sb.Session) -> None:
    await make_all_kinds(sbx)
    info = await sbx.stat("d/file")
    assert isinstance(info, sb.FileInfo)
    assert (info.path, info.name, info.kind) == ("d/file", "file", "file")
    assert (info.size, info.mode) == (5, 0o750)
    assert abs(info.mtime - time.time()) < 60
    link = await sbx.stat("d/link")
    assert link.kind == "symlink"
    assert link.size == len("/etc/hostname")


async def test_the_work_dir_itself_is_listed_and_described(sbx: sb.Session) -> None:
    await sbx.put_bytes("f", b"x")
    assert "f" in [info.name for info in await sbx.list_dir()]
    for path in (".", sbx.work_dir):
        assert (await sbx.stat(path)).kind == "dir"
        assert await sbx.list_dir(path) == await sbx.list_dir()
        assert await sbx.exists(path)


async def test_exists_says_whether_the_name_is_taken(sbx: sb.Session) -> None:
    await make_all_kinds(sbx)
    for name in ("d", "d/file", "d/link", "d/dangling", "d/fifo", f"d/{RAW}"):
        assert await sbx.exists(name) is True, name
    for name in ("no", "d/no", "no/no", "d/file/below"):
        assert await sbx.exists(name) is False, name
    # No answer about what is behind a link would be true.
    with pytest.raises(PermissionError):
        await sbx.exists("d/linkdir/x")


async def test_directories_are_made_with_those_above_them(sbx: sb.Session) -> None:
    await sbx.make_dir("a/b/c")
    await sbx.make_dir("a/b/c")
    await sbx.make_dir(".")
    assert (await sbx.stat("a/b/c")).kind == "dir"
    for path in ("a/b", "."):
        with pytest.raises(FileExistsError):
            await sbx.make_dir(path, exist_ok=False)
    with pytest.raises(FileNotFoundError):
        await sbx.make_dir("x/y", parents=False)
    assert not await sbx.exists("x")
    await sbx.make_dir("x", parents=False, exist_ok=False)
    result = await sbx.exec("echo y > a/b/c/f && rm a/b/c/f && rmdir a/b/c x")
    assert result.ok, result.stderr


async def test_remove_removes_exactly_the_path(sbx: sb.Session) -> None:
    await make_all_kinds(sbx)
    for name in ("file", "link", "dangling", "fifo", "linkdir", "new\nline", RAW):
        await sbx.remove(f"d/{name}")
    assert [info.name for info in await sbx.list_dir("d")] == ["sub"]
    with pytest.raises(OSError, match="not empty") as caught:
        await sbx.remove("d")
    assert isinstance(caught.value, sb.SandboxError)
    assert caught.value.code == "not-empty"
    await sbx.remove("d/sub")
    await sbx.remove("d")
    assert not await sbx.exists("d")
    await make_all_kinds(sbx)
    await sbx.remove("d", recursive=True)
    assert not await sbx.exists("d")
    assert os.path.exists("/etc/hostname")


async def test_a_tree_that_resists_is_removed(sbx: sb.Session) -> None:
    await sbx.run_code(
        "import os; os.makedirs('t/a/b'); open('t/a/b/f', 'w').close()\n"
        "for name in ('t/a/b', 't/a'): os.chmod(name, 0)\n"
        "os.chdir('t')\n"
        "for _ in range(600): os.mkdir('deep'); os.chdir('deep')\n"
    )
    await sbx.remove("t", recursive=True)
    assert not await sbx.exists("t")


REFUSED = {
    "list missing": ("list_dir", "missing", FileNotFoundError),
    "list a file": ("list_dir", "file", NotADirectoryError),
    "list a link": ("list_dir", "linkdir", PermissionError),
    "list below a link": ("list_dir", "linkdir/sub", PermissionError),
    "list outside": ("list_dir", "/etc", PermissionError),
    "list above": ("list_dir", "..", PermissionError),
    "stat missing": ("stat", "missing", FileNotFoundError),
    "stat below a file": ("stat", "file/x", NotADirectoryError),
    "stat below a link": ("stat", "linkdir/sub", PermissionError),
    "stat outside": ("stat", "/etc/passwd", PermissionError),
    "exists outside": ("exists", "/etc/passwd", PermissionError),
    "exists above": ("exists", "../x", PermissionError),
    "make on a file": ("make_dir", "file", FileExistsError),
    "make below a file": ("make_dir", "file/x", NotADirectoryError),
    "make below a link": ("make_dir", "linkdir/new", PermissionError),
    "make on a link": ("make_dir", "linkdir", PermissionError),
    "make outside": ("make_dir", "/tmp/contract-made", PermissionError),
    "remove missing": ("remove", "missing", FileNotFoundError),
    "remove below a link": ("remove", "linkdir/sub", PermissionError),
    "remove outside": ("remove", "/etc/passwd", PermissionError),
    "remove the work dir": ("remove", ".", ValueError),
}


async def test_refused_with_the_builtin_that_fits(sbx: sb.Session) -> None:
    made = await sbx.exec("mkdir -p dir/sub; ln -s dir linkdir; echo x > file")
    assert made.ok, made.stderr
    for case, (call, path, error) in REFUSED.items():
        with pytest.raises(error) as caught:
            await getattr(sbx, call)(path)
        assert isinstance(caught.value, sb.SandboxError), case
        assert path in str(caught.value), case
    assert sorted(os.listdir(f"{host_dir(sbx)}/dir")) == ["sub"]
    assert not os.path.exists("/tmp/contract-made")


BAD = {
    "path type": ("list_dir", (7,), {}, "path"),
    "stat path": ("stat", ("",), {}, "path"),
    "exists path": ("exists", ("a\0b",), {}, "path"),
    "parents": ("make_dir", ("d",), {"parents": 1}, "parents"),
    "exist_ok": ("make_dir", ("d",), {"exist_ok": "yes"}, "exist_ok"),
    "recursive": ("remove", ("file",), {"recursive": None}, "recursive"),
    "upload local": ("upload", (None, "d"), {}, "local"),
    "upload empty": ("upload", ("", "d"), {}, "local"),
    "upload path": ("upload", ("/tmp", "../d"), {}, "path"),
    "upload limit": ("upload", ("/tmp", "d"), {"max_files": -1}, "max_files"),
    "download local": ("download", ("file", 3), {}, "local"),
    "download NUL": ("download", ("file", "a\0b"), {}, "local"),
    "download limit": ("download", ("file", "x"), {"max_bytes": True}, "max_bytes"),
    "download overwrite": ("download", ("file", "x"), {"overwrite": 0}, "overwrite"),
    "download progress": ("download", ("file", "x"), {"progress": 5}, "progress"),
}


async def _slow_progress(done: int, total: int | None, path: str) -> None: ...


@pytest.mark.spec("C10")
async def test_bad_arguments_are_named_and_nothing_happens(
    sbx: sb.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await sbx.put_bytes("file", b"x")
    awaited = ("download", ("file", "x"), {"progress": _slow_progress}, "progress")
    for case, (call, args, options, argument) in {**BAD, "awaited": awaited}.items():
        with pytest.raises(sb.SandboxUsageError, match=argument) as caught:
            await getattr(sbx, call)(*args, **options)
        assert caught.value.argument == argument, case
    assert not await sbx.exists("d")
    assert await sbx.get_bytes("file") == b"x"
    assert os.listdir(tmp_path) == []
