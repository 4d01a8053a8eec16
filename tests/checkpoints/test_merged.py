"""Merged layers show the same files as the layers that they replace, or are not made."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.checkpoints.test_checkpoints import own_directories
from tests.checkpoints.test_hostile import ACT, changes_of, state_of
from tests.conftest import ISOLATED, eventually, session_of

from union.sandbox._linux import layer_merge
from union.sandbox._linux.layer_merge import LayerMerge
from union.sandbox.on_device import _layer_merging
from union.sandbox.on_device._layer_merging import LayerMerger
from union.sandbox.on_device._layer_store import mounted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from union import sandbox as sb
    from union.sandbox.on_device._layer_store import Layer
    from union.sandbox.on_device._work_state import WorkState

LIMIT = layer_merge.TreeCost(entries=1000, size=1 << 20)


@pytest.fixture(params=ISOLATED)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge after every third checkpoint."""
    monkeypatch.setattr(_layer_merging, "MIN_LAYERS", 3)


def state_in(session: sb.Session) -> WorkState:
    return session._transport.checkpoint_calls._state  # type: ignore[union-attr]


def lower_of(session: sb.Session) -> tuple[Layer, ...]:
    layers = state_in(session).layers
    assert layers is not None
    return layers.lower


async def settled(session: sb.Session) -> None:
    """Wait for removals and the work of merges."""
    while state_in(session).removals:
        await asyncio.wait(state_in(session).removals)


async def finished(session: sb.Session) -> None:
    """Wait for merges, while no command runs."""
    while (task := state_in(session).merger._task) is not None:
        await asyncio.wait([task])
    await settled(session)


async def deepened(session: sb.Session, number: int) -> list[sb.Checkpoint]:
    kept = []
    for n in range(number):
        await session.put_bytes("changed", str(n).encode())
        kept.append(await session.checkpoint())
        await finished(session)
    return kept


EVERYTHING = """
import hashlib, json, os, stat
found, links = {}, {}
for where, dirs, files in os.walk("."):
    if where == ".": dirs[:] = [d for d in dirs if d != ".sandbox-venv"]
    for name in (*dirs, *files):
        path = os.path.join(where, name)[2:]
        s = os.lstat(path)
        body = os.readlink(path) if stat.S_ISLNK(s.st_mode) else ""
        if stat.S_ISREG(s.st_mode):
            body = hashlib.sha256(open(path, "rb").read()).hexdigest()
            links.setdefault(s.st_ino, []).append(path)
        marks = {n: os.getxattr(path, n, follow_symlinks=False).hex()
                 for n in os.listxattr(path, follow_symlinks=False)}
        found[path] = [s.st_mode, s.st_uid, s.st_gid, s.st_mtime_ns, body, marks,
                       0 if stat.S_ISDIR(s.st_mode) else s.st_size]
print(json.dumps([found, sorted(sorted(one) for one in links.values() if len(one) > 1)]))
"""
TURNS = (
    # Every kind of entry.
    """
    import os, socket
    os.makedirs("d/e/f"); open("d/a", "w").write("1"); open("d/e/b", "w").write("2")
    os.makedirs("gone/x/y"); open("gone/x/y/z", "w").write("3")
    os.makedirs("again/old"); open("again/old/file", "w").write("4")
    open("to-dir", "w").write("5"); os.mkdir("to-file"); open("to-file/inner", "w").write("6")
    """,
    """
    import os
    os.mkfifo("pipe", 0o620); os.symlink("d/a", "link"); os.symlink("nowhere", "d/dangling")
    open("one", "w").write("linked"); os.link("one", "d/two"); os.link("one", "three")
    os.chmod("one", 0o751); os.chmod("d", 0o1770)
    with open("sparse", "wb") as f:
        f.seek(1 << 20); f.write(b"end"); f.truncate(3 << 20)
    os.setxattr("d/a", "user.mine", b"value"); os.setxattr("d/e", "user.dir", b"other")
    os.utime("d/a", ns=(1_000_000_001, 2_000_000_002)); os.utime("d/e/f", ns=(3, 4))
    os.utime("link", ns=(5, 6), follow_symlinks=False)
    """,
    """
    import os, shutil
    shutil.rmtree("gone"); shutil.rmtree("again"); os.makedirs("again/new")
    os.unlink("to-dir"); os.mkdir("to-dir"); open("to-dir/in", "w").write("7")
    shutil.rmtree("to-file"); open("to-file", "w").write("8")
    os.unlink("d/e/b"); open("fresh", "w").write("9")
    """,
    """
    import os
    os.unlink("fresh"); os.unlink("three"); os.mkdir("gone"); open("gone/w", "w").write("10")
    os.makedirs("again/old"); open("d/e/f/deep", "w").write("11")
    os.chmod("d/e/f", 0o511); open("d/a", "a").write("more")
    """,
    """
    import os, shutil
    shutil.rmtree("to-dir"); os.unlink("to-file"); os.mkdir("fresh"); open("fresh/c", "w")
    os.chmod("d/e/f", 0o755); os.unlink("d/e/f/deep"); os.rmdir("d/e/f")
    os.rename("one", "moved"); os.makedirs("pure/a"); open("pure/a/b", "w").write("12")
    """,
    "import os; os.unlink('pure/a/b'); os.mkdir('pure/a/b')",
    "import os; os.rmdir('pure/a/b'); os.unlink('gone/w'); os.rmdir('gone')",
)


async def everything(session: sb.Session) -> Any:
    return json.loads(await session.run_code(EVERYTHING))


@pytest.mark.spec("L1", "L2")
@pytest.mark.usefixtures("often")
async def test_merged_layers_show_every_kind_of_entry(way: str) -> None:
    async with session_of(way) as session:
        kept = []
        for turn in TURNS:
            await session.run_code(turn)
            kept.append((await session.checkpoint(), await everything(session)))
            await finished(session)
        assert any(layer.merged for layer in lower_of(session))
        last, wanted = kept[-1]
        merged = mounted(lower_of(session))
        assert len(merged) < len(lower_of(session))
        # The mount before shows the layers one by one, the one after it the merged ones.
        await session.rollback(last)
        assert await everything(session) == wanted
        assert int((await session.exec("stat -c %b sparse", check=True)).stdout) < 2000
        for checkpoint, wanted in kept:
            await session.rollback(checkpoint)
            assert await everything(session) == wanted
            assert await session.diff(checkpoint) == ()
            async with checkpoint.fork() as other:
                assert await everything(other) == wanted


@pytest.mark.spec("L1", "L2")
@pytest.mark.threat(187)
@pytest.mark.usefixtures("often")
async def test_random_changes_with_merges(way: str) -> None:
    """Every checkpoint and every diff is exact, whichever layers are merged."""
    async with session_of(way) as session:
        kept: list[tuple[sb.Checkpoint, dict[str, Any]]] = []
        for round_ in range(24):
            await session.run_code(ACT.replace("SEED", str(100 + round_)))
            kept.append((await session.checkpoint(), await state_of(session)))
            await finished(session)
            if round_ % 6 == 5:
                checkpoint, wanted = kept[round_ // 2]
                now = await state_of(session)
                found = {one.path: one.action for one in await session.diff(checkpoint)}
                assert found == changes_of(wanted, now)
                await session.rollback(kept[-1][0])
                assert await state_of(session) == kept[-1][1]
        assert len(mounted(lower_of(session))) <= 10
        for checkpoint, wanted in kept:
            await session.rollback(checkpoint)
            assert await state_of(session) == wanted


@pytest.mark.spec("L2")
@pytest.mark.usefixtures("often")
async def test_a_merge_that_is_not_exact_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the tests above see a file that a merge does not delete."""
    monkeypatch.setattr(LayerMerge, "_is_shown_below", lambda *_: False)
    async with session_of("userns") as session:
        await session.put_bytes("a", b"1")
        await session.checkpoint()
        await session.remove("a")
        kept = (await deepened(session, 3))[-1]
        await session.rollback(kept)
        assert "a" in await state_of(session)


@pytest.mark.spec("L1")
async def test_long_chains_are_short_mounts() -> None:
    async with session_of("userns") as session:
        kept = await deepened(session, 64)
        assert len(lower_of(session)) == 64
        assert len(mounted(lower_of(session))) <= 14
        for number in (63, 0, 40):
            await session.rollback(kept[number])
            assert await session.get_bytes("changed") == str(number).encode()


@pytest.mark.spec("L1", "L2")
@pytest.mark.usefixtures("often")
async def test_merged_layers_go_with_the_last_that_needs_them(way: str) -> None:
    async with session_of(way) as session:
        where = os.path.dirname(session._transport.host_dir)  # type: ignore[union-attr]
        kept = await deepened(session, 8)
        merged = [layer.merged.layer for layer in lower_of(session) if layer.merged]
        assert len(merged) >= 2
        assert all(os.path.exists(one.path) for one in merged)
        async with kept[-1].fork() as other:
            await session.rollback(kept[0])
            for one in kept[1:]:
                await one.drop()
            await finished(session)
            # The fork shows them, and nothing else needs them.
            assert await other.get_bytes("changed") == b"7"
            assert any(os.path.exists(one.path) for one in merged)
        assert eventually(lambda: not any(os.path.exists(one.path) for one in merged))
        await session.put_bytes("changed", b"last")
        await deepened(session, 4)
        other = await (await session.checkpoint()).fork().open()
    assert await other.get_bytes("changed") == b"3"
    await other.close()
    assert own_directories(where) == set()


@pytest.mark.spec("L1")
@pytest.mark.usefixtures("often")
async def test_a_session_that_closes_during_a_merge_leaves_nothing() -> None:
    for turns in (0, 1, 3, 10, 30):
        async with session_of("userns") as session:
            where = os.path.dirname(session._transport.host_dir)  # type: ignore[union-attr]
            for number in range(4):
                await session.put_bytes("changed", str(number).encode())
                await session.checkpoint()
            assert state_in(session).merger._task is not None
            for _ in range(turns):
                await asyncio.sleep(0)
        assert own_directories(where) == set()


@pytest.mark.spec("L1")
@pytest.mark.usefixtures("often")
async def test_commands_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    check = LayerMerger._check_idle
    may_go_on = threading.Event()

    def check_late(merger: LayerMerger) -> None:
        if threading.current_thread() is not threading.main_thread():
            loop.call_soon_threadsafe(begun.set)
            may_go_on.wait(10)
        check(merger)

    monkeypatch.setattr(LayerMerger, "_check_idle", check_late)
    async with session_of("userns") as session:
        for number in range(4):
            await session.put_bytes("changed", str(number).encode())
            await session.checkpoint()
        await begun.wait()
        running = await session.run("sleep 60", background=True)
        may_go_on.set()
        await settled(session)
        assert not any(layer.merged or layer.is_single for layer in lower_of(session))
        made = filter(str.isdigit, os.listdir(state_in(session).store().path))
        assert sorted(made) == ["1", "2", "3", "4"]  # what the merge has made is removed
        running.kill()
        await running.wait()
        await finished(session)
        assert any(layer.merged for layer in lower_of(session))


@pytest.mark.spec("L1")
@pytest.mark.usefixtures("often")
async def test_large_layers_stay_alone() -> None:
    async with session_of("userns") as session:
        await session.checkpoint()
        await session.put_bytes("large", bytes(_layer_merging.LIMIT.size + 4096))
        await session.checkpoint()
        large = lower_of(session)[0]
        await deepened(session, 6)
        assert large.is_single
        assert large in mounted(lower_of(session))
        assert any(layer.merged for layer in lower_of(session))  # those above it


@pytest.mark.spec("L1", "L2")
@pytest.mark.threat(188)
@pytest.mark.usefixtures("often")
async def test_directories_that_their_owner_cannot_read(way: str) -> None:
    async with session_of(way) as session:
        await session.checkpoint()
        await session.exec("mkdir shut; echo 1 > shut/a; echo 2 > b; chmod 0 shut b", check=True)
        await session.checkpoint()
        kept = (await deepened(session, 6))[-1]
        await session.rollback(kept)
        shown = "stat -c %a shut b; chmod 700 shut b; cat shut/a b"
        assert (await session.exec(shown, check=True)).stdout == "0\n0\n1\n2\n"


@pytest.mark.spec("L1", "L2")
@pytest.mark.usefixtures("often")
async def test_renamed_directories_of_lower_layers(way: str) -> None:
    """The kernel marks them for root; such layers are not merged, and stay exact."""
    async with session_of(way) as session:
        await session.exec("mkdir -p d/e; echo 1 > d/e/a; echo 2 > d/b", check=True)
        await session.checkpoint()
        await session.exec("mv d moved; echo 3 > moved/c", check=True)
        await session.checkpoint()
        kept = (await deepened(session, 6))[-1]
        await session.rollback(kept)
        assert (await session.exec("ls -R moved; cat moved/e/a moved/b moved/c; ls")).stdout == (
            "moved:\nb\nc\ne\n\nmoved/e:\na\n1\n2\n3\nchanged\nmoved\n"
        )


# Merges without a session: marks that are understood, and those that are not.


def merge(layers: Sequence[Path], target: Path, below: Path, **options: Any) -> None:
    target.mkdir(exist_ok=True)
    fd = os.open(below, os.O_PATH | os.O_DIRECTORY)
    options = {"marks": "user.overlay.", "limit": LIMIT, **options}
    try:
        LayerMerge([str(one) for one in layers], str(target), below=fd, **options).run()
    finally:
        os.close(fd)


@pytest.fixture
def tops(outside_tmp: Path) -> tuple[Path, Path, Path]:
    made = tuple(outside_tmp / name for name in ("upper", "middle", "below"))
    for one in made:
        (one / "d").mkdir(parents=True)
    (made[0] / "d" / "a").write_text("top")
    (made[1] / "d" / "a").write_text("hidden")
    (made[1] / "d" / "b").write_text("kept")
    return made[0], made[1], made[2]


def test_whiteouts_stay_only_where_they_hide_something(
    tops: tuple[Path, Path, Path], outside_tmp: Path
) -> None:
    upper, middle, below = tops
    (below / "d" / "old").write_text("1")
    for name in ("d/old", "d/b", "d/never"):
        os.mknod(upper / name, stat.S_IFCHR, 0)
    (middle / "d" / "new").mkdir()
    os.setxattr(middle / "d" / "new", "user.overlay.opaque", b"y")
    (upper / "d" / "new").mkdir()
    os.mknod(upper / "d" / "new" / "gone", stat.S_IFCHR, 0)
    merge((upper, middle), outside_tmp / "made", below)
    made = outside_tmp / "made" / "d"
    assert sorted(os.listdir(made)) == ["a", "new", "old"]
    assert stat.S_ISCHR((made / "old").stat().st_mode)
    assert (made / "old").stat().st_rdev == 0
    assert (made / "a").read_text() == "top"
    assert os.getxattr(made / "new", "user.overlay.opaque") == b"y"
    assert os.listdir(made / "new") == []


@pytest.mark.parametrize(
    "path, mark, value",
    [
        ("d", "redirect", b"/other"),
        ("d", "opaque", b"x"),
        ("d/a", "metacopy", b""),
        ("d/a", "whiteout", b"y"),
        ("d", "unknown", b"y"),
        (".", "opaque", b"y"),
    ],
)
def test_marks_that_are_not_understood_refuse_the_merge(
    tops: tuple[Path, Path, Path], outside_tmp: Path, path: str, mark: str, value: bytes
) -> None:
    merge(tops[:2], outside_tmp / "control", tops[2])
    os.setxattr(tops[0] / path, f"user.overlay.{mark}", value)
    with pytest.raises(layer_merge.MergeRefusedError):
        merge(tops[:2], outside_tmp / "made", tops[2])


def test_attributes_of_the_code_are_copied(
    tops: tuple[Path, Path, Path], outside_tmp: Path
) -> None:
    for name in ("user.mine", "user.overlay.overlay.opaque", "user.overlay.origin"):
        os.setxattr(tops[0] / "d" / "a", name, b"1")
    merge(tops[:2], outside_tmp / "made", tops[2])
    found = os.listxattr(outside_tmp / "made" / "d" / "a")
    assert sorted(found) == ["user.mine", "user.overlay.overlay.opaque"]


def test_a_merge_ends_at_its_limit_and_when_it_is_stopped(
    tops: tuple[Path, Path, Path], outside_tmp: Path
) -> None:
    for limit in (layer_merge.TreeCost(2, 1 << 20), layer_merge.TreeCost(10, 100)):
        with pytest.raises(layer_merge.MergeRefusedError, match="too large"):
            merge(tops[:2], outside_tmp / f"made-{limit.entries}", tops[2], limit=limit)

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        merge(tops[:2], outside_tmp / "stopped", tops[2], pause=stop)
    assert layer_merge.cost_of(str(tops[1]), LIMIT).entries == 3


def test_a_disk_with_little_room_is_not_used(
    outside_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _layer_merging._check_room(str(outside_tmp), layer_merge.TreeCost(10, 10))
    found = os.statvfs(outside_tmp)
    free = found.f_bavail * found.f_frsize
    with pytest.raises(OSError, match="little room"):
        _layer_merging._check_room(str(outside_tmp), layer_merge.TreeCost(1, free // 5))
