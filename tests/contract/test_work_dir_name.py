"""The work dir under a name that the caller chooses, and listings of it."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest
from tests.conftest import REMOTE, host_dir, session_of

from union import sandbox as sb

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import OpenSession

NAME = "/workspace"


def isolates(way: str) -> bool:
    return way.removeprefix(REMOTE) not in {"none", "landlock"}


@pytest.mark.spec("R4")
async def test_the_venv_is_not_in_listings(sbx: sb.Session) -> None:
    await sbx.run_code("open('f', 'w')")
    assert [entry.path for entry in await sbx.list_dir()] == ["f"]
    assert [entry.path for entry in await sbx.list_dir(sbx.work_dir)] == ["f"]
    assert await sbx.exists(".sandbox-venv/pyvenv.cfg"), "it is left out, not hidden"
    await sbx.put_bytes("d/.sandbox-venv", b"")
    assert [entry.path for entry in await sbx.list_dir("d")] == ["d/.sandbox-venv"]


@pytest.mark.spec("R4")
async def test_git_ignores_the_venv_of_a_pinned_work_dir(
    open_session: OpenSession, outside_tmp: Path
) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed: apt-get install git")
    status = "git -c safe.directory='*' status --porcelain --untracked-files=all"
    async with open_session(host_work_dir=str(outside_tmp)) as session:
        await session.put_bytes("mine", b"")
        done = await session.exec(f"git init -q . && {status}")
        assert (done.stdout, done.returncode) == ("?? mine\n", 0), done.stderr
        ignored = await session.exec(f"{status} --ignored")
        assert ".sandbox-venv/pyvenv.cfg" in ignored.stdout, "control: the venv is there"


@pytest.mark.spec("R4")
async def test_commands_and_file_calls_see_the_name(open_session: OpenSession, way: str) -> None:
    if not isolates(way):
        with pytest.raises(sb.SandboxUsageError, match="cannot show the work dir") as caught:
            open_session(work_dir_name=NAME)
        assert caught.value.hint
        return
    async with open_session(work_dir_name=NAME) as sbx:
        assert sbx.work_dir == NAME
        assert (await sbx.exec("pwd; echo $HOME")).stdout == f"{NAME}\n{NAME}\n"
        await sbx.put_bytes(f"{NAME}/f", b"by name")
        assert (await sbx.exec(f"cat {NAME}/f", cwd=NAME)).stdout == "by name"
        assert await sbx.get_bytes("f") == b"by name"
        code = "import sys; print(sys.prefix, open('/workspace/f').read())"
        for _ in range(2):  # also where a Python waits
            assert await sbx.run_code(code) == f"{NAME}/.sandbox-venv by name\n"
        # File calls of a machine see all that is visible inside, where there is no such file.
        with pytest.raises((sb.SandboxPathError, FileNotFoundError)):
            await sbx.get_bytes("/workspace2/f")


@pytest.mark.spec("R4", "B3")
async def test_a_pinned_work_dir_gets_the_name_too(
    open_session: OpenSession, way: str, tmp_path: Path
) -> None:
    if not isolates(way):
        pytest.skip("a backend without mounts shows no other name")
    (tmp_path / "f").write_text("mine")
    async with open_session(host_work_dir=str(tmp_path), work_dir_name=NAME) as sbx:
        assert (await sbx.exec(["cat", f"{NAME}/f"])).stdout == "mine"
        assert not (await sbx.exec(["ls", str(tmp_path)])).ok, "the host's name is not visible"
        await sbx.exec("echo made > g")
    assert (tmp_path / "g").read_text() == "made\n"


@pytest.mark.spec("R4", "B2")
async def test_a_renamed_private_work_dir_is_removed(open_session: OpenSession, way: str) -> None:
    if not isolates(way):
        pytest.skip("a backend without mounts shows no other name")
    async with open_session(work_dir_name="/tmp/deep/er") as sbx:
        assert (await sbx.exec("pwd")).stdout == "/tmp/deep/er\n"
        if not way.startswith(REMOTE):
            work = sbx._transport.host_dir  # type: ignore[union-attr]
            assert os.path.isdir(work)
    if not way.startswith(REMOTE):
        assert not os.path.exists(work)


@pytest.mark.spec("R4", "C10")
@pytest.mark.parametrize(
    "name", ["workspace", "/", "/tmp", "/usr", "/usr/x", "/etc/x", "/w/../x", "/w/", "/w//x", 3]
)
def test_names_that_are_refused(name: object) -> None:
    with pytest.raises(sb.SandboxUsageError, match="work_dir_name"):
        session_of("userns", work_dir_name=name)


@pytest.mark.spec("R4", "C10")
async def test_a_name_over_something_visible_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in (str(tmp_path), str(tmp_path / "d"), str(tmp_path / "d" / "below")):
        session = session_of("userns", work_dir_name=name, read_only_paths=[str(tmp_path / "d")])
        with pytest.raises(sb.PolicyError, match=r"work_dir_name|contains the work dir"):
            await session.open()
    async with session_of("userns", work_dir_name=str(tmp_path / "beside")) as sbx:
        assert (await sbx.exec("pwd")).stdout == f"{tmp_path}/beside\n"
        assert host_dir(sbx)
