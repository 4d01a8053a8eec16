"""Attacks on read-only paths inside directories that sandboxed code can write."""

# ruff: noqa: E501 - an attack program keeps each try on one line
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.escape.inside import attack, program
from tests.escape.plants import SECRET, driver_source, snapshot

import union.sandbox
from union import sandbox as sb
from union.sandbox._linux import host_programs
from union.sandbox._linux.pinning import Places

if TYPE_CHECKING:
    from tests.conftest import OpenSession

pytestmark = pytest.mark.spec("E4", "B5")


@pytest.fixture
def layout(work: str) -> Path:
    """A work dir with `in/deep/data`, which the tests show read-only, and a file in it."""
    data = Path(work, "in", "deep", "data")
    data.mkdir(parents=True)
    (data / "input").write_text(SECRET)
    Path(work, "other").mkdir()
    return Path(work)


_REPLACE = """
tries = {}
for top in ("in", "in/deep", "in/deep/data"):
    tries["rename " + top] = attempt(os.rename, top, "moved")
    tries["into " + top] = attempt(os.rename, top, "other/moved")
    tries["exchange " + top] = call({"x86_64": 316, "aarch64": 276}[platform.machine()], -100, top.encode(), -100, b"other", 2)
    tries["over " + top] = attempt(os.rename, "other", top)
    tries["rmdir " + top] = attempt(os.rmdir, top)
    tries["unlink " + top] = attempt(os.unlink, top)
    tries["umount " + top] = call("umount2", top.encode(), 2)
    tries["move mount " + top] = call("mount", top.encode(), b"other", None, 8192, None)
os.path.exists("in/deep/data/input") and tries.update({"write": attempt(write, "in/deep/data/input"), "create": attempt(write, "in/deep/data/new")})
out["tries"] = tries
out["used"] = [attempt(write, "in/new"), attempt(write, "in/deep/new"), attempt(os.rename, "in/new", "in/newer"), attempt(os.rename, "other", "others")]
"""


@pytest.mark.threat(130)
async def test_no_directory_above_a_read_only_path_can_be_replaced(
    jailed: OpenSession, layout: Path
) -> None:
    """Two dozen ways, also in a waiting sandbox; without the read-only path they work."""
    data = layout / "in" / "deep" / "data"
    before = snapshot(data)
    async with jailed(host_work_dir=str(layout), read_only_paths=[str(data)]) as jail:
        for _ in range(2):
            found = await attack(jail, _REPLACE)
            assert "ok" not in found["tries"].values(), found
            assert found["used"] == ["ok"] * 4, "the rest of the work dir is writable"
            (layout / "others").rename(layout / "other")
        assert found["tries"]["rename in"] == "EBUSY"
        read_only = jail.fs_allowlist()["read_only"]
        assert str(data) in read_only
        assert str(layout / "in") not in (*read_only, *jail.fs_allowlist()["read_write"])
        assert snapshot(data) == before
    async with jailed(host_work_dir=str(layout)) as jail:
        found = await attack(jail, _REPLACE)
        assert found["tries"]["rename in"] == "ok", "the control"


@pytest.mark.threat(130)
async def test_every_name_of_a_read_only_path_is_protected(
    jailed: OpenSession, layout: Path, tmp_path: Path
) -> None:
    """The work dir is named through a link, the read-only path is not; and below /tmp as well."""
    (tmp_path / "link").symlink_to(layout)
    data = layout / "in" / "deep" / "data"
    before = snapshot(data)
    options = {
        "host_work_dir": str(tmp_path / "link"),
        "read_only_paths": [str(data)],
        "read_write_paths": [str(layout / "in")],
    }
    async with jailed(**options) as jail:
        code = """
        for top in given["tops"]:
            out[top] = [attempt(os.rename, f"{top}/deep", f"{top}/x"), attempt(write, f"{top}/deep/data/input"), attempt(write, f"{top}/fine")]
        """
        tops = [str(tmp_path / "link" / "in"), str(layout / "in")]
        found = await attack(jail, code, given={"tops": tops})
    assert set(map(tuple, found.values())) == {("EBUSY", "EROFS", "ok")}, found
    assert snapshot(data) == before


_CALLER = """
work, code = sys.argv[1], sys.argv[2]
async with session(host_work_dir=work) as jail:
    print((await jail.exec("echo x > tools/.venv/later.py; echo x > tools/.venv/bin/python")).stdout)
    print((await jail.exec(["python", "-c", code])).stdout)
    import later
    print(later.__file__)
"""
_TAKE_OVER = """
import glob, os, shutil
try:
    os.rename("tools", "t2")
except OSError as exc:
    print("refused", exc.errno)
else:
    shutil.copytree("t2/.venv", "tools/.venv", symlinks=True)
    site = glob.glob("tools/.venv/lib/python*/site-packages")[0]
    open(site + "/later.py", "w").write("print('taken over')")
    print("replaced")
"""


def _venv(where: Path) -> Path:
    """A venv that sees what this Python sees; returns its interpreter."""
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", where], check=True)
    site = next(where.glob("lib/python*/site-packages"))
    paths = sysconfig.get_paths()
    own = Path(union.sandbox.__file__).parents[2]
    lines = dict.fromkeys((paths["purelib"], paths["platlib"], str(own)))
    (site / "seen.pth").write_text("\n".join(lines) + "\n")
    (site / "later.py").write_text("print('the real one')\n")
    (where / "bin" / "uv").symlink_to(host_programs.find_uv(Places()))
    return where / "bin" / "python"


@pytest.mark.threat(29, 130)
def test_the_callers_venv_below_the_work_dir_stays_its_own(cell: str, work: str) -> None:
    """A repository with `tools/.venv`: what the caller imports next comes from there."""
    python = _venv(Path(work, "tools", ".venv"))
    command = [python, "-I", "-c", driver_source(cell, _CALLER), work, _TAKE_OVER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "refused 16" in done.stdout
    assert "the real one" in done.stdout
    assert "taken over" not in done.stdout
    # The control: without the session's mounts the same program takes the venv over.
    bare = [sys.executable, "-I", "-c", f"import os; os.chdir({work!r})\n{_TAKE_OVER}"]
    assert subprocess.check_output(bare, text=True) == "replaced\n"
    assert (
        subprocess.check_output([python, "-I", "-c", "import later"], text=True) == "taken over\n"
    )


@pytest.mark.threat(130)
def test_a_python_behind_a_link_in_the_work_dir_is_refused(cell: str, work: str) -> None:
    """The link could be pointed at another Python; without a link the same session opens."""
    _venv(Path(work, "real"))
    Path(work, "current").symlink_to("real")
    body = "async with session(host_work_dir=sys.argv[1]) as jail:\n    print((await jail.exec('echo open')).stdout)"
    source = driver_source(cell, body)
    for name, opens in (("current", False), ("real", True)):
        command = [f"{work}/{name}/bin/python", "-I", "-c", source, work]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode == 0) is opens, done.stderr
        assert ("open" in done.stdout) is opens
        if not opens:
            assert "BackendUnavailableError" in done.stderr
            assert f"{work}/current, a link" in done.stderr


_OVERWRITE = """
write("lib/union/mine")
for name in ("_linux/bin/sandbox-launcher", "__init__.py", "new.py"):
    path = "lib/union/sandbox/" + name
    out[name] = [attempt(write, path), attempt(os.rename, "lib/union/mine", path), attempt(os.unlink, path)]
out["rename"] = [attempt(os.rename, top, "moved") for top in ("lib", "lib/union")]
out["beside"] = attempt(write, "lib/union/fine")
"""


@pytest.mark.threat(3, 129)
def test_this_package_in_the_work_dir_cannot_be_changed(cell: str, work: str) -> None:
    """A checkout that is worked on: its launcher and its modules are executed by the host."""
    own = Path(union.sandbox.__file__).parent
    copy = Path(work, "lib", "union", "sandbox")
    shutil.copytree(own, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    body = """
    print(sb.__file__)
    async with session(host_work_dir=sys.argv[1]) as jail:
        print((await jail.exec(["python", "-c", sys.argv[2]])).stdout)
    """
    command = [sys.executable, "-B", "-c", driver_source(cell, body), work, program(_OVERWRITE)]
    env = {**os.environ, "PYTHONPATH": f"{work}/lib"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=env, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    where, found = done.stdout.split("\n", 1)
    assert where == str(copy / "__init__.py")
    tries = json.loads(found)
    assert tries.pop("beside") == "ok", "the control: the rest is writable"
    assert tries.pop("rename") == ["EBUSY", "EXDEV"]
    assert len(tries) == 3
    assert all("ok" not in results for results in tries.values()), tries
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


# The host's own cleanup.


@pytest.mark.threat(131)
async def test_the_repair_of_the_venv_does_not_delete_read_only_paths(
    jailed: OpenSession, layout: Path
) -> None:
    """A directory above it gets the name of the venv: from inside, and by another session."""
    data = layout / "in" / "deep" / "data"
    before = {path.name: path.read_bytes() for path in data.iterdir()}
    options = {"host_work_dir": str(layout), "read_only_paths": [str(data)]}
    plant = "mv .sandbox-venv v$$; touch in/lib; mv in .sandbox-venv"
    async with jailed(**options) as jail:
        assert (await jail.exec(plant)).returncode != 0
        assert await jail.run_code("print('works')") == "works\n"
        async with jailed(host_work_dir=str(layout)) as other:
            assert (await other.exec(plant)).returncode == 0, "the control: it is not held there"
        for path in (".sandbox-venv", ".sandbox-venv/deep"):
            with pytest.raises(sb.SandboxError, match="read-only"):
                await jail.remove(path, recursive=True)
        with pytest.raises(sb.SandboxError):
            await jail.run_code("print('works')")
    moved = layout / ".sandbox-venv" / "deep" / "data"
    assert {path.name: path.read_bytes() for path in moved.iterdir()} == before
    (layout / ".sandbox-venv").rename(layout / "in")
    async with jailed(**options) as jail:
        assert await jail.run_code("print('works')") == "works\n"
    assert {path.name: path.read_bytes() for path in data.iterdir()} == before


# The caller replaces a read-only file.


def _save(path: Path, text: str) -> None:
    """As editors do."""
    new = path.with_name(".new")
    new.write_text(text)
    new.rename(path)


@pytest.mark.threat(132)
@pytest.mark.parametrize("how", ["once", "often", "same inode", "moved", "directory above"])
async def test_a_file_is_read_only_again_in_the_run_after_it_was_replaced(
    jailed: OpenSession, layout: Path, how: str
) -> None:
    """The kernel drops the mount of a file that is replaced; inode numbers are used again."""
    file = layout / "in" / "settings"
    file.write_text("one")
    attack_it = "echo changed > in/settings; rm -f in/settings; mv in/settings x; cat in/settings"
    async with jailed(host_work_dir=str(layout), read_only_paths=[str(file)]) as jail:
        assert (await jail.exec(attack_it)).stdout == "one"
        assert await jail.run_code("print(open('in/settings').read())") == "one\n"
        if how == "directory above":
            (layout / "in").rename(layout / "was")
            (layout / "in").mkdir()
            file.write_text("two")
        elif how == "same inode":
            os.link(file, layout / "name")
            file.unlink()
            os.link(layout / "name", file)
            (layout / "name").unlink()
        elif how == "moved":
            file.rename(layout / "in" / "old")
            file.write_text("two")
        else:
            for _ in range(1 if how == "once" else 4):
                _save(file, "two")
        expected = "one" if how == "same inode" else "two"
        assert (await jail.exec(attack_it)).stdout == expected
        code = "try:\n    open('in/settings', 'w')\nexcept OSError as exc:\n    print(exc.errno)"
        assert await jail.run_code(code) == "30\n"
        assert file.read_text() == expected
        assert str(file) in jail.fs_allowlist()["read_only"]


@pytest.mark.threat(132)
async def test_a_command_is_refused_while_a_read_only_file_is_missing(
    jailed: OpenSession, layout: Path
) -> None:
    """Also by a sandbox that is being built when the file is deleted."""
    file = layout / "in" / "settings"
    file.write_text("one")
    options = {"host_work_dir": str(layout), "read_only_paths": [str(file)]}
    async with jailed(**options) as jail:
        assert (await jail.exec("cat in/settings")).stdout == "one"
        file.unlink()
        with pytest.raises(sb.SandboxError, match="No such file"):
            await jail.exec("cat in/settings")
        file.write_text("three")
        result = await jail.exec("echo changed > in/settings; cat in/settings")
        assert result.stdout == "three"
    async with jailed(host_work_dir=str(layout)) as jail:
        assert (
            await jail.exec("echo changed > in/settings; cat in/settings")
        ).stdout == "changed\n"


@pytest.mark.threat(132)
async def test_the_file_api_does_not_replace_read_only_paths(
    jailed: OpenSession, layout: Path
) -> None:
    """That would take the mount away from commands that are running."""
    data = layout / "in" / "deep" / "data"
    before = snapshot(data)
    async with jailed(
        host_work_dir=str(layout), read_only_paths=[str(data / "input"), str(data)]
    ) as jail:
        for path in ("in/deep/data/input", "in/deep/data/new", str(data / "input")):
            with pytest.raises(PermissionError, match="read-only") as caught:
                await jail.put_bytes(path, b"changed")
            assert getattr(caught.value, "code", "") == "path-read-only"
        with pytest.raises(PermissionError, match="read-only"):
            await jail.remove("in/deep/data/input")
        with pytest.raises(sb.SandboxError, match="read-only"):
            await jail.remove("in", recursive=True)
        await jail.put_bytes("in/deep/beside", b"fine")
        assert await jail.get_bytes("in/deep/data/input") == SECRET.encode()
    assert snapshot(data) == before


@pytest.mark.threat(132)
async def test_strict_refuses_a_file_whose_protection_the_caller_can_lose(
    jailed: OpenSession, layout: Path
) -> None:
    """A directory is accepted."""
    data = layout / "in" / "deep" / "data"
    async with jailed(host_work_dir=str(layout)) as jail:
        if jail.isolation.proc != "fresh" or jail.isolation.root != "pivot":
            pytest.skip("strict=True opens no session in this container: unmask its /proc")
    options = {"host_work_dir": str(layout), "strict": True}
    with pytest.raises(sb.PolicyError, match="strict=True") as caught:
        await jailed(read_only_paths=[str(data / "input")], **options).open()
    assert "name the directory" in caught.value.hint
    async with jailed(read_only_paths=[str(data)], **options) as jail:
        assert (await jail.exec("cat in/deep/data/input")).stdout == SECRET
