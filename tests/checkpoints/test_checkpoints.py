"""Checkpoints: keep a state, return to it, fork it, compare with it."""

from __future__ import annotations

import asyncio
import os
import tarfile
from io import BytesIO
from typing import TYPE_CHECKING

import pytest
from tests.conftest import WAYS, session_of

from union import sandbox as sb
from union.sandbox.errors import SandboxBusyError

if TYPE_CHECKING:
    from pathlib import Path

DESTROY = "rm -r src link; echo changed >> b.txt; echo new > c.txt; mkdir src; echo z > src/z.txt"
STATE = "find . -path ./.sandbox-venv -prune -o -printf '%P %M %l\\n' | sort; cat b.txt src/a.txt"


async def text(session: sb.Session, command: str) -> str:
    return (await session.exec(command, check=True)).stdout


@pytest.mark.spec("L1", "L2")
async def test_rollback_restores_what_was_there(kept: sb.Session) -> None:
    before = await text(kept, STATE)
    checkpoint = await kept.checkpoint("start")
    assert await text(kept, STATE) == before
    await kept.exec(DESTROY, check=True)
    assert await text(kept, "ls src") == "z.txt\n"
    await kept.rollback(checkpoint)
    assert await text(kept, STATE) == before
    # A second time, and from inside Python: the venv is there too.
    await kept.exec(DESTROY, check=True)
    await kept.rollback(checkpoint.id)
    assert await kept.run_code("print(open('src/a.txt').read(), end='')") == "one\n"
    assert await text(kept, STATE) == before


@pytest.mark.spec("L1")
async def test_any_of_several_checkpoints(kept: sb.Session) -> None:
    taken = []
    for number in range(4):
        await kept.put_bytes("n.txt", str(number).encode())
        taken.append(await kept.checkpoint(f"step {number}"))
    assert [one.name for one in await kept.checkpoints()] == [f"step {n}" for n in range(4)]
    assert all(isinstance(one.size_bytes, int) for one in await kept.checkpoints())
    for number in (1, 3, 0):
        await kept.rollback(taken[number])
        assert await kept.get_bytes("n.txt") == str(number).encode()
    await taken[1].drop()
    assert len(await kept.checkpoints()) == 3
    with pytest.raises(sb.SandboxUsageError) as error:
        await kept.rollback(taken[1])
    assert error.value.code == "no-such-checkpoint"
    await kept.rollback(taken[2])
    assert await kept.get_bytes("n.txt") == b"2"


@pytest.mark.spec("L1")
async def test_diff_lists_every_change(kept: sb.Session) -> None:
    checkpoint = await kept.checkpoint()
    assert await kept.diff(checkpoint) == ()
    await kept.exec(DESTROY + "; chmod 600 c.txt; ln -s c.txt fresh", check=True)
    changes = {change.path: change for change in await kept.diff(checkpoint, content=True)}
    assert {path: change.action for path, change in changes.items()} == {
        "b.txt": "changed",
        "c.txt": "added",
        "fresh": "added",
        "link": "deleted",
        "src": "changed",
        "src/a.txt": "deleted",
        "src/deep": "deleted",
        "src/deep/run.sh": "deleted",
        "src/z.txt": "added",
    }
    assert (changes["c.txt"].mode, changes["c.txt"].size) == (0o600, 4)
    assert changes["b.txt"].old_size == 4
    assert changes["src"].old_mode == 0o700
    assert changes["b.txt"].text == "--- a/b.txt\n+++ b/b.txt\n@@ -1 +1,2 @@\n two\n+changed\n"
    assert changes["fresh"].kind == "symlink"
    assert changes["src/deep"].kind == "dir"
    # The state of a dropped change is not a change.
    await kept.rollback(checkpoint)
    assert await kept.diff(checkpoint) == ()


@pytest.mark.spec("L1")
async def test_touching_a_file_is_no_change(kept: sb.Session) -> None:
    checkpoint = await kept.checkpoint()
    await kept.exec("touch b.txt; cat src/a.txt > t; cat t > src/a.txt; rm t", check=True)
    assert await kept.diff(checkpoint) == ()


@pytest.mark.spec("L1", "L2")
async def test_a_fork_is_a_session_of_its_own(kept: sb.Session, place: str) -> None:
    checkpoint = await kept.checkpoint()
    await kept.put_bytes("b.txt", b"parent")
    async with checkpoint.fork() as other:
        assert await other.get_bytes("b.txt") == b"two\n"
        assert place == "none" or other.work_dir == kept.work_dir
        await other.exec("echo fork > b.txt; echo f > only-fork", check=True)
        assert await kept.get_bytes("b.txt") == b"parent"
        assert await text(kept, "ls") == "b.txt\nlink\nsrc\n"
        assert [change.path for change in await other.diff(checkpoint)] == ["b.txt", "only-fork"]
        again = await other.checkpoint("of the fork")
        async with again.fork() as third:
            assert await third.get_bytes("only-fork") == b"f\n"
            await third.exec("rm only-fork", check=True)
        assert await other.get_bytes("only-fork") == b"f\n"


@pytest.mark.spec("L1")
async def test_a_fork_goes_on_when_its_parent_is_closed(place: str) -> None:
    parent = await session_of(place).open()
    await parent.put_bytes("a", b"kept")
    checkpoint = await parent.checkpoint()
    other = await checkpoint.fork().open()
    await parent.close()
    try:
        assert await text(other, "cat a; echo more >> a; cat a") == "keptkeptmore\n"
        await other.rollback(await other.checkpoint())
        with pytest.raises(sb.SessionClosedError):
            await checkpoint.drop()
    finally:
        await other.close()


@pytest.mark.spec("L1", "L2")
async def test_many_forks_do_not_see_each_other(kept: sb.Session) -> None:
    forks = await (await kept.checkpoint()).fork_many(4)
    try:
        await asyncio.gather(
            *(one.exec(f"echo {number} > mine") for number, one in enumerate(forks))
        )
        found = [await one.get_bytes("mine") for one in forks]
        assert found == [b"0\n", b"1\n", b"2\n", b"3\n"]
        await kept.adopt(forks[2])
    finally:
        for one in forks:
            await one.close()
    assert await text(kept, "cat mine b.txt") == "2\ntwo\n"
    assert [one.name for one in await kept.checkpoints()] == ["", "adopted"]


@pytest.mark.spec("L1")
async def test_an_archive_of_a_checkpoint(kept: sb.Session, tmp_path: Path, place: str) -> None:
    before = await text(kept, STATE)
    checkpoint = await kept.checkpoint()
    size = await checkpoint.export(tmp_path / "state.tar")
    assert size == (tmp_path / "state.tar").stat().st_size
    async with session_of(place) as other:
        imported = await other.import_checkpoint(tmp_path / "state.tar", "from elsewhere")
        assert not [info.path for info in await other.list_dir(".")]
        await other.rollback(imported)
        assert await text(other, STATE) == before
        await other.exec("echo more >> src/a.txt", check=True)


@pytest.mark.spec("L1")
async def test_an_archive_replaces_regular_files_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "old.tar").write_text("old")
    async with session_of("userns") as session:
        checkpoint = await session.checkpoint()
        for path in (tmp_path, tmp_path / "pipe"):
            with pytest.raises(sb.SandboxUsageError, match="no regular file") as caught:
                await checkpoint.export(path)
            assert caught.value.argument == "path"
        assert await checkpoint.export(tmp_path / "old.tar") > len("old")
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "old.tar"}


@pytest.mark.spec("L2")
@pytest.mark.parametrize("name", ["../out", "/abs", "a/../../b", "a//b"])
async def test_an_archive_cannot_leave_its_tree(name: str, tmp_path: Path) -> None:
    content = BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        item = tarfile.TarInfo(name)
        item.size = 1
        archive.addfile(item, BytesIO(b"x"))
    (tmp_path / "bad.tar").write_bytes(content.getvalue())
    async with session_of("userns") as session:
        with pytest.raises(sb.SandboxUsageError, match="outside of the tree"):
            await session.import_checkpoint(tmp_path / "bad.tar")
        assert await session.checkpoints() == ()


@pytest.mark.spec("L2")
async def test_an_archive_does_not_write_through_its_own_links(tmp_path: Path) -> None:
    content = BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        link = tarfile.TarInfo("to")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        archive.addfile(link)
        item = tarfile.TarInfo("to/evil")
        item.size = 1
        archive.addfile(item, BytesIO(b"x"))
    (tmp_path / "bad.tar").write_bytes(content.getvalue())
    async with session_of("userns") as session:
        with pytest.raises(sb.SandboxError):
            await session.import_checkpoint(tmp_path / "bad.tar")
    assert not (tmp_path / "evil").exists()


@pytest.mark.spec("L3")
async def test_a_running_command_is_named_by_its_files() -> None:
    """Where its processes cannot be found with certainty, they are not stopped."""
    async with session_of("none") as kept:
        command = "exec 3> held.txt; echo ready; sleep 60"
        running = await kept.run(command, stdout=True, background=True)
        assert await anext(running.iter_stdout_lines()) == "ready"
        with pytest.raises(SandboxBusyError) as error:
            await kept.checkpoint()
        assert error.value.code == "session-busy"
        assert error.value.running == 1
        assert error.value.files == ("held.txt",)
        assert await kept.checkpoints() == ()
        running.kill()
        await running.wait()
        await kept.checkpoint()


@pytest.mark.spec("L2", "L3")
async def test_rollback_ends_what_runs(kept: sb.Session) -> None:
    checkpoint = await kept.checkpoint()
    running = await kept.run("echo ready; sleep 60; echo late > late", stdout=True, background=True)
    assert await anext(running.iter_stdout_lines()) == "ready"
    await kept.rollback(checkpoint)
    await running.wait()
    assert running.termination_reason == "closed"
    assert await kept.diff(checkpoint) == ()


@pytest.mark.spec("L3")
async def test_the_report_says_what_it_is_made_of(kept: sb.Session, place: str) -> None:
    assert kept.isolation.layers == "plain"
    checkpoint = await kept.checkpoint()
    wanted = "copy" if place == "none" else "overlay"
    assert (checkpoint.kind, kept.isolation.layers) == (wanted, wanted)
    assert (await kept.run("true")).isolation.layers == wanted
    assert checkpoint.took_s > 0


@pytest.mark.spec("L1")
async def test_file_calls_see_the_same_files_as_commands(layered: sb.Session) -> None:
    await layered.put_bytes("low", b"1")
    checkpoint = await layered.checkpoint()
    await layered.put_bytes("low", b"2")
    await layered.put_bytes("dir/new", b"3", mode=0o640)
    assert await text(layered, "cat low dir/new; echo 4 >> low; echo 5 >> dir/new") == "23"
    assert await layered.get_bytes("low") == b"24\n"
    assert (await layered.stat("dir/new")).mode == 0o640
    await layered.remove("dir", recursive=True)
    assert await text(layered, "ls") == "low\n"
    await layered.rollback(checkpoint)
    assert await layered.get_bytes("low") == b"1"


@pytest.mark.spec("L1")
async def test_calls_with_limits_and_paths_of_their_own(
    layered: sb.Session, outside_tmp: Path
) -> None:
    (outside_tmp / "shown").write_text("shown")
    await layered.put_bytes("a", b"old")
    checkpoint = await layered.checkpoint()
    await layered.put_bytes("a", b"new")
    call = {"read_only_paths": [outside_tmp], "resources": sb.Resources(processes=64)}
    found = await layered.exec(f"cat a {outside_tmp}/shown; echo call > b", check=True, **call)
    assert found.stdout == "newshown"
    assert await layered.get_bytes("b") == b"call\n"
    await layered.rollback(checkpoint)
    assert (await layered.exec("cat a; ls", check=True, **call)).stdout == "olda\n"
    with pytest.raises(sb.PolicyError, match="after its first checkpoint"):
        await layered.exec("true", read_only_paths=[f"{layered.work_dir}/a"])


@pytest.mark.spec("L1", "L3")
async def test_a_pinned_work_dir_stays_the_truth(outside_tmp: Path, place: str) -> None:
    (outside_tmp / "mine").write_text("one")
    (outside_tmp / "closed").mkdir(0o500)
    identity = outside_tmp.stat().st_ino
    async with session_of(place, host_work_dir=outside_tmp) as session:
        checkpoint = await session.checkpoint()
        assert checkpoint.kind == "copy"
        await session.exec("echo two > mine; echo n > new; rmdir closed", check=True)
        async with checkpoint.fork() as other:
            assert await other.get_bytes("mine") == b"one"
            await other.exec("echo fork > mine", check=True)
            assert other.isolation.layers == ("copy" if place == "none" else "overlay")
        assert (outside_tmp / "mine").read_text() == "two\n"
        assert {c.path for c in await session.diff(checkpoint)} == {"mine", "new", "closed"}
        await session.rollback(checkpoint)
        assert (outside_tmp / "mine").read_text() == "one"
        found = sorted(p.name for p in outside_tmp.iterdir() if p.name[0] != ".")
        assert found == ["closed", "mine"]
        assert (outside_tmp / "closed").stat().st_mode & 0o777 == 0o500
    assert outside_tmp.stat().st_ino == identity
    assert (outside_tmp / "mine").read_text() == "one"


@pytest.mark.spec("L4")
async def test_without_a_checkpoint_the_work_dir_is_a_plain_directory(layered: sb.Session) -> None:
    kind = "stat -f -c %T .; grep -c ' overlay ' /proc/self/mountinfo"
    plain = await text(layered, f"({kind}) || true")
    assert "checkpoint_calls" not in vars(layered._transport)
    await layered.checkpoint()
    assert await text(layered, f"({kind}) || true") != plain  # the control


@pytest.mark.spec("L1")
async def test_names_and_arguments_are_checked(layered: sb.Session) -> None:
    for name in ("a\nb", "x" * 201, 5):
        with pytest.raises(sb.SandboxUsageError) as error:
            await layered.checkpoint(name)  # type: ignore[arg-type]
        assert error.value.argument == "name"
    for wrong in (None, 3):
        with pytest.raises(sb.SandboxUsageError) as error:
            await layered.rollback(wrong)  # type: ignore[arg-type]
        assert error.value.argument == "checkpoint"
    with pytest.raises(sb.SandboxUsageError, match="another session"):
        await layered.adopt(layered)
    checkpoint = await layered.checkpoint()
    with pytest.raises(sb.SandboxUsageError, match="count"):
        await checkpoint.fork_many(0)


@pytest.mark.spec("L1")
async def test_the_first_state_can_be_given_up(layered: sb.Session) -> None:
    """No layer of the session's own directory is left, but it carries the mount."""
    await layered.put_bytes("a", b"1")
    first = await layered.checkpoint()
    async with first.fork() as other:
        await other.put_bytes("a", b"2")
        await layered.adopt(other)
    await first.drop()
    await asyncio.sleep(0.2)  # layers are removed in a thread
    for _ in range(3):
        assert await text(layered, "pwd; cat a") == f"{layered.work_dir}\n2"


@pytest.mark.spec("L1")
async def test_a_machine_has_no_checkpoints() -> None:
    async with session_of("machine-userns") as session:
        await session.exec("echo 1 > a", check=True)
        with pytest.raises(sb.SandboxUsageError) as error:
            await session.checkpoint()
        assert error.value.code == "checkpoint-unsupported"
        assert (await session.exec("cat a", check=True)).stdout == "1\n"


@pytest.mark.spec("L1")
async def test_a_fork_outlives_the_checkpoint_that_it_comes_from(place: str) -> None:
    async with session_of(place) as session:
        await session.put_bytes("a", b"1")
        checkpoint = await session.checkpoint()
        fork = checkpoint.fork()
        async with fork as other:
            await checkpoint.drop()
            await session.put_bytes("a", b"2")
            assert await other.get_bytes("a") == b"1"
            assert await other.diff(checkpoint) == ()
        with pytest.raises(sb.SandboxUsageError) as error:
            await checkpoint.fork().open()
        assert error.value.code == "no-such-checkpoint"


@pytest.mark.spec("L1")
@pytest.mark.parametrize("place", WAYS)
async def test_layers_are_removed_with_the_last_session(place: str) -> None:
    async with session_of(place) as session:
        where = os.path.dirname(session._transport.host_dir)  # type: ignore[union-attr]
        await session.put_bytes("a", b"1")
        checkpoint = await session.checkpoint()
        other = await checkpoint.fork().open()
        await other.checkpoint()
        await session.rollback(checkpoint)
        assert own_directories(where)
    await other.close()
    assert own_directories(where) == set()


def own_directories(where: str) -> set[str]:
    return {name for name in os.listdir(where) if name.startswith(f"sandbox-{os.getpid()}-")}
