"""put_bytes and get_bytes, and which paths a sandbox sees."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import RACE, SOON_S, host_dir, interpreter_under

from union import sandbox as sb

if TYPE_CHECKING:
    from tests.conftest import OpenSession

MIB = 1024 * 1024
NAMES = [
    "plain",
    "with space",
    "new\nline",
    "žluť-🐎",
    "-rf",
    "a'b\"c$`",
    b"raw\xff\xfe".decode("utf-8", "surrogateescape"),
    "x" * 255,
]


@pytest.mark.spec("E1")
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
async def test_any_bytes_like_goes_in_and_comes_back(sbx: sb.Session, kind: type) -> None:
    data = bytes(range(256)) * 100
    assert await sbx.put_bytes("f", kind(data)) == len(data)
    assert await sbx.get_bytes("f") == data
    assert (await sbx.exec("wc -c < f")).stdout.strip() == str(len(data))


@pytest.mark.spec("E1")
async def test_wide_items_are_counted_in_bytes(sbx: sb.Session) -> None:
    view = memoryview(b"\1\0\2\0").cast("H")
    assert await sbx.put_bytes("f", view) == 4
    assert await sbx.get_bytes("f") == b"\1\0\2\0"


@pytest.mark.spec("E1")
async def test_empty_and_large(sbx: sb.Session) -> None:
    assert await sbx.put_bytes("empty", b"") == 0
    assert await sbx.get_bytes("empty") == b""
    data = os.urandom(1 << 16) * 512
    assert await sbx.put_bytes("large", data) == 32 * MIB
    assert await sbx.get_bytes("large") == data


@pytest.mark.spec("E1")
@pytest.mark.parametrize("name", NAMES)
async def test_any_name_a_file_can_have(sbx: sb.Session, name: str) -> None:
    for path in (name, f"{sbx.work_dir}/{name}", f"deep/er/{name}"):
        assert await sbx.put_bytes(path, path.encode("utf-8", "surrogateescape")) > 0
        assert await sbx.get_bytes(path) == path.encode("utf-8", "surrogateescape")
    assert (await sbx.exec(["cat", "--", name])).ok


@pytest.mark.spec("E1")
async def test_relative_absolute_and_path_objects_are_the_same_file(sbx: sb.Session) -> None:
    await sbx.put_bytes("a/b/f", b"1")
    for path in (
        f"{sbx.work_dir}/a/b/f",
        "./a//b/./f",
        Path("a/b/f"),
        Path(sbx.work_dir) / "a/b/f",
    ):
        assert await sbx.get_bytes(path) == b"1"  # type: ignore[arg-type]


@pytest.mark.spec("E1")
async def test_a_written_file_belongs_to_the_sandbox(sbx: sb.Session) -> None:
    await sbx.put_bytes("made/here/f", b"x")
    result = await sbx.exec("echo y >> made/here/f && rm made/here/f && rmdir made/here made")
    assert result.ok, result.stderr


@pytest.mark.spec("E1")
async def test_a_file_of_the_sandbox_can_be_read(sbx: sb.Session) -> None:
    await sbx.run("umask 077; mkdir -p d; echo secret > d/f; chmod 600 d/f; chmod 700 d")
    assert await sbx.get_bytes("d/f") == b"secret\n"


@pytest.mark.spec("E1")
async def test_mode_and_overwrite(sbx: sb.Session) -> None:
    await sbx.put_bytes("f", b"first")
    assert stat.S_IMODE(os.stat(f"{host_dir(sbx)}/f").st_mode) == 0o644
    with pytest.raises(FileExistsError) as caught:
        await sbx.put_bytes("f", b"second", overwrite=False)
    assert isinstance(caught.value, sb.SandboxError)
    assert await sbx.get_bytes("f") == b"first"
    await sbx.put_bytes("f", b"x", mode=0o755)
    assert stat.S_IMODE(os.stat(f"{host_dir(sbx)}/f").st_mode) == 0o755
    assert await sbx.get_bytes("f") == b"x"
    await sbx.put_bytes("new", b"", overwrite=False, mode=0o600)
    assert stat.S_IMODE(os.stat(f"{host_dir(sbx)}/new").st_mode) == 0o600


@pytest.mark.spec("E1")
async def test_a_file_larger_than_asked_for_is_refused_not_cut(sbx: sb.Session) -> None:
    await sbx.put_bytes("f", b"12345")
    assert await sbx.get_bytes("f", max_bytes=5) == b"12345"
    with pytest.raises(sb.SandboxError, match="4") as caught:
        await sbx.get_bytes("f", max_bytes=4)
    assert caught.value.code == "file-too-large"
    await sbx.run("truncate -s 3G sparse")
    with pytest.raises(sb.SandboxError) as caught:
        await sbx.get_bytes("sparse")
    assert caught.value.code == "file-too-large"


REFUSED = {
    "missing": ("get", "missing", FileNotFoundError),
    "missing parent": ("get", "no/such/f", FileNotFoundError),
    "directory": ("get", "dir", IsADirectoryError),
    "put on a directory": ("put", "dir", IsADirectoryError),
    "below a file": ("get", "file/x", NotADirectoryError),
    "put below a file": ("put", "file/x", NotADirectoryError),
    "outside": ("get", "/etc/hostname", PermissionError),
    "put outside": ("put", "/tmp/contract-outside", PermissionError),
    "climbing": ("get", "../x", PermissionError),
    "climbing inside": ("get", "dir/../file", PermissionError),
    "put climbing": ("put", "dir/../../x", PermissionError),
    "a link": ("get", "link", PermissionError),
    "put through a link": ("put", "link", PermissionError),
    "a linked directory": ("get", "linkdir/file", PermissionError),
    "put in a linked directory": ("put", "linkdir/new", PermissionError),
    "a dangling link": ("put", "dangling", PermissionError),
    "fifo": ("get", "fifo", PermissionError),
    "put on a fifo": ("put", "fifo", PermissionError),
    "socket": ("get", "socket", PermissionError),
}


@pytest.mark.spec("E1", "E2")
async def test_refused_at_once_with_the_builtin_that_fits(sbx: sb.Session) -> None:
    await sbx.put_bytes("file", b"x")
    made = await sbx.exec(
        "mkdir dir; ln -s /etc/hostname link; ln -s dir linkdir; ln -s nowhere dangling; "
        "mkfifo fifo; touch dir/file; python -c 'import socket; "
        'socket.socket(socket.AF_UNIX).bind("socket")\''
    )
    assert made.ok, made.stderr
    for case, (how, path, error) in REFUSED.items():
        began = time.monotonic()
        with pytest.raises(error) as caught:
            await (sbx.get_bytes(path) if how == "get" else sbx.put_bytes(path, b"data"))
        assert time.monotonic() - began < SOON_S, case
        assert isinstance(caught.value, sb.SandboxError), case
        assert path in str(caught.value), case
    assert not os.path.exists("/tmp/contract-outside")


@pytest.mark.spec("E2")
async def test_a_hard_link_to_outside_is_not_written_through(
    open_session: OpenSession, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    os.link(outside, work / "f")
    async with open_session(host_work_dir=str(work)) as session:
        await session.put_bytes("f", b"new")
        assert await session.get_bytes("f") == b"new"
    assert outside.read_text() == "untouched"


@pytest.mark.spec("E2")
async def test_a_tree_that_changes_under_the_call(sbx: sb.Session, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_text("SECRET")
    swapper = await sbx.run(
        f"mkdir real; echo fine > real/f; while :; do ln -sfn {outside} d; rm -rf d; "
        "cp -r real d; rm -rf d; done 2>/dev/null",
        background=True,
    )
    end = time.monotonic() + 1.5 * RACE
    good = 0
    while time.monotonic() < end or not good:
        try:
            assert await sbx.get_bytes("d/f") in {b"fine\n", b"mine", b""}
            good += 1
        except OSError as exc:
            assert isinstance(exc, sb.SandboxError)  # noqa: PT017 - either outcome is right
        try:
            await sbx.put_bytes("d/f", b"mine")
        except OSError as exc:
            assert isinstance(exc, sb.SandboxError)  # noqa: PT017 - either outcome is right
    swapper.kill()
    await swapper.wait()
    assert good
    assert sorted(p.name for p in outside.iterdir()) == ["f"]
    assert (outside / "f").read_text() == "SECRET"


@pytest.mark.spec("E1")
async def test_files_move_beside_running_commands(sbx: sb.Session) -> None:
    busy = asyncio.create_task(sbx.exec("sleep 0.3"))
    await asyncio.gather(*(sbx.put_bytes(f"f{n}", b"%d" % n) for n in range(20)))
    found = await asyncio.gather(*(sbx.get_bytes(f"f{n}") for n in range(20)))
    assert found == [b"%d" % n for n in range(20)]
    assert (await busy).ok


@pytest.mark.spec("E4")
async def test_paths_visible_by_default(jail: sb.Session, tmp_path: Path) -> None:
    (tmp_path / "host").write_text("x")
    assert not (await jail.exec(["test", "-e", str(tmp_path)])).ok
    for place in ("/root/.ssh", "/home", "/var/log", "/etc/shadow", "/boot"):
        listed = await jail.exec(f"ls -A {place}")
        shown = interpreter_under(place)
        assert listed.returncode != 0 or (shown and set(listed.stdout.split()) == shown), place
    assert (await jail.exec("test -x /bin/sh && test -r /etc/passwd && echo x > /tmp/x")).ok


@pytest.mark.spec("E4", "G5")
async def test_the_report_of_paths(jail: sb.Session) -> None:
    found = jail.fs_allowlist()
    assert {jail.work_dir, "/tmp", "/dev/shm"} <= set(found["read_write"])
    assert "/usr" in found["read_only"]
    for path in found["read_write"]:
        assert (await jail.exec(["sh", "-c", 'test -w "$0"', path])).ok, path
    for path in found["read_only"]:
        assert (await jail.exec(["sh", "-c", 'test -e "$0" && ! test -w "$0"', path])).ok, path
    default = sb.on_device.default_fs_allowlist()
    assert set(default["read_write"]) <= set(found["read_write"])
    assert "/usr" in default["read_only"]


@pytest.mark.spec("E4")
async def test_added_paths(jail: sb.Session, tmp_path: Path) -> None:
    for name in ("ro", "rw"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text(name)
    (tmp_path / "hidden").write_text("x")
    (tmp_path / "one").write_text("file")
    session = sb.on_device.session(
        backend=jail.backend,
        read_only_paths=[str(tmp_path / "ro"), tmp_path / "one"],
        read_write_paths=[str(tmp_path / "rw")],
    )
    async with session:
        found = await session.exec(f"cd {tmp_path}; cat ro/f rw/f one; ls")
        assert found.stdout == "rorwfileone\nro\nrw\n"
        assert not (await session.exec(f"echo x > {tmp_path}/ro/g")).ok
        assert not (await session.exec(f"echo x > {tmp_path}/one")).ok
        assert (await session.exec(f"echo new > {tmp_path}/rw/g")).ok
        assert (await session.exec("echo x > here; ls /usr >/dev/null; echo x > /tmp/x")).ok
    assert (tmp_path / "rw" / "g").read_text() == "new\n"
    assert (tmp_path / "rw" / "g").stat().st_uid == os.geteuid()
    assert (tmp_path / "one").read_text() == "file"


@pytest.mark.spec("E4", "C10")
@pytest.mark.parametrize("argument", ["read_only_paths", "read_write_paths"])
async def test_a_missing_added_path_is_an_error_at_open(
    open_session: OpenSession, argument: str
) -> None:
    session = open_session(**{argument: ["/nonexistent/path"]})
    try:
        with pytest.raises(sb.SandboxUsageError, match="/nonexistent/path") as caught:
            await session.open()
    finally:
        await session.close()
    assert caught.value.argument == argument


@pytest.mark.spec("E4")
async def test_a_host_socket_is_out_of_reach(jail: sb.Session, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        code = f"import socket; socket.socket(socket.AF_UNIX).connect({str(tmp_path / 's')!r})"
        result = await jail.exec(code, script_type="python")
        assert "FileNotFoundError" in result.stderr
