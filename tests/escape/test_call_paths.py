"""Attacks on the paths and limits of one call: they must not exceed the rules of its session."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED, RACE, children_of, descendants, descriptors, eventually
from tests.escape.plants import SECRET, snapshot
from tests.servers import ServerProcess

from union import sandbox as sb
from union.sandbox._core import resolve_call
from union.sandbox._linux import kernel
from union.sandbox._linux.launcher import Launcher

if TYPE_CHECKING:
    from tests.conftest import OpenSession

pytestmark = pytest.mark.threat(173)
ARGUMENTS = ("read_only_paths", "read_write_paths")


@pytest.fixture(autouse=True)
def ids_stay() -> None:
    if kernel.is_root() and not kernel.can_map_mounts():
        pytest.skip(
            "root may not map ids here, so that paths of a call would change the ids of its "
            "sandbox and are refused: grant SYS_ADMIN to the container"
        )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory that sandboxes may write to, with a directory in it."""
    path = tmp_path / "place"
    (path / "dir").mkdir(parents=True)
    (path / "dir" / "own").write_text("fine")
    for one in (path, path / "dir"):
        one.chmod(0o777)
    return path


@pytest.mark.parametrize("spelling", ["itself", "below", "link", "link below"])
async def test_a_call_cannot_write_to_read_only_paths_of_its_session(
    jailed: OpenSession, plant: Path, tmp_path: Path, spelling: str
) -> None:
    (tmp_path / "alias").symlink_to(plant)
    path = {
        "itself": plant,
        "below": plant / "inner",
        "link": tmp_path / "alias",
        "link below": tmp_path / "alias" / "inner",
    }[spelling]
    attack = f"echo broken > {path}/deep; echo broken > {path}/secret"
    async with jailed() as jail:  # the attack works where the session does not forbid it
        assert (await jail.exec(attack, read_write_paths=[str(path)])).ok
    assert "broken" in (path / "secret").read_text()
    before = snapshot(plant)
    async with jailed(read_only_paths=[str(plant)]) as jail:
        with pytest.raises(sb.PolicyError, match="read-only") as caught:
            await jail.exec(attack, read_write_paths=[str(path)])
        assert caught.value.argument == "read_write_paths"
    assert snapshot(plant) == before


async def test_a_read_only_path_is_not_writable_under_another_name(
    jailed: OpenSession, place: Path, tmp_path: Path
) -> None:
    (tmp_path / "alias").symlink_to(place)
    alias = str(tmp_path / "alias")
    async with jailed(read_write_paths=[str(place)]) as jail:
        with pytest.raises(sb.PolicyError, match="would stay writable") as caught:
            await jail.exec("true", read_only_paths=[alias])
        assert str(place) in caught.value.hint
        below = f"echo x > {place}/dir/x; echo x > {alias}/dir/x"
        result = await jail.exec(below, read_only_paths=[f"{alias}/dir"])
        assert result.stderr.count("Read-only") == 2
        # The remedy of the hint.
        both = [alias, str(place)]
        result = await jail.exec(f"cat {alias}/dir/own; echo x > {place}/x", read_only_paths=both)
        assert result.stdout == "fine"
        assert "Read-only" in result.stderr
    assert not (place / "x").exists()


@pytest.mark.threat(27)
@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("where", ["work dir", "writable path"])
async def test_a_link_that_a_command_left_does_not_lead_the_next_call_out(
    jailed: OpenSession, place: Path, plant: Path, argument: str, where: str
) -> None:
    options: dict[str, object] = {"host_work_dir": str(place)}
    if where == "writable path":
        options = {"read_write_paths": [str(place)]}
    before = snapshot(plant)
    async with jailed(**options) as jail:
        named = [str(place / "dir" / "inner")]
        (place / "dir" / "inner").mkdir()
        assert (await jail.exec("true", **{argument: named})).ok
        planted = await jail.exec(f"cd {place} && mv dir old && ln -s {plant} dir")
        assert planted.ok, planted.stderr
        assert (place / "dir" / "inner" / "deep").read_text() == SECRET, "the plant is there"
        look = f"cat {place}/dir/inner/deep; echo x > {place}/dir/inner/deep"
        with pytest.raises(sb.PolicyError, match="link"):
            await jail.exec(look, **{argument: named})
        assert SECRET not in (await jail.exec(look)).stdout
    assert snapshot(plant) == before


FLIP = """
import ctypes, os, time
libc = ctypes.CDLL(None)
os.chdir({place!r})
print("flipping", flush=True)
end = time.monotonic() + 20
while time.monotonic() < end:
    libc.renameat2(-100, b"dir", -100, b"out", 2)
"""


async def race(session: sb.Session, place: Path, argument: str) -> None:
    """Name a directory in calls while a command exchanges it for a link to the plant."""
    flips = await session.run(FLIP.format(place=str(place)), script_type="python", stdout=True)
    assert await anext(flips.iter_stdout_lines()) == "flipping"
    path = str(place / "dir")
    look = f"cat {path}/secret; echo x > {path}/secret"
    seen: Counter[str] = Counter()
    end = time.monotonic() + RACE
    while time.monotonic() < end or not (seen["shown"] and seen["refused"]):
        assert time.monotonic() < end + 20, seen
        try:
            result = await session.exec(look, **{argument: [path]})  # type: ignore[arg-type]
        except sb.SandboxError:
            seen["refused"] += 1
        else:
            assert SECRET not in result.stdout
            seen["shown"] += 1
    flips.kill()
    await flips.wait()


@pytest.mark.threat(27)
@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("where", ["host_work_dir", "read_write_paths"])
async def test_an_exchanged_link_in_a_writable_place_is_never_followed(
    jailed: OpenSession, place: Path, plant: Path, argument: str, where: str
) -> None:
    (place / "out").symlink_to(plant)
    before = snapshot(plant)
    options = {where: str(place) if where == "host_work_dir" else [str(place)]}
    async with jailed(**options) as jail:
        await race(jail, place, argument)
    assert snapshot(plant) == before


@pytest.mark.threat(27)
@pytest.mark.parametrize("argument", ARGUMENTS)
async def test_a_link_from_a_writable_path_of_an_earlier_call_is_not_followed(
    jailed: OpenSession, place: Path, plant: Path, argument: str
) -> None:
    named = str(place / "dir" / "inner")
    async with jailed() as jail:
        leave = f"cd {place} && mv dir old && ln -s {plant} dir"
        assert (await jail.exec(leave, read_write_paths=[str(place)])).ok
        assert (place / "dir" / "inner" / "deep").read_text() == SECRET, "the plant is there"
        with pytest.raises(sb.PolicyError, match="link"):
            await jail.exec(f"cat {named}/deep", **{argument: [named]})  # type: ignore[arg-type]
    async with jailed() as other:
        with pytest.raises(sb.PolicyError, match="link"):
            await other.exec("true", **{argument: [named]})  # type: ignore[arg-type]


@pytest.mark.threat(129)
@pytest.mark.parametrize("argument", ARGUMENTS)
async def test_a_refused_path_changes_nothing_for_others(
    jailed: OpenSession, argument: str
) -> None:
    async with jailed() as jail:
        for path in ("/", "/etc", "/proc"):
            with pytest.raises(sb.PolicyError):
                await jail.exec("true", **{argument: [path]})  # type: ignore[arg-type]
            with pytest.raises(sb.SandboxError):
                await jailed(**{argument: [path]}).open()
        assert (await jail.exec("echo works")).stdout == "works\n"
    async with jailed() as other:
        assert (await other.exec("echo works")).stdout == "works\n"


@pytest.mark.threat(27)
@pytest.mark.parametrize("backend", ISOLATED)
@pytest.mark.parametrize("argument", ARGUMENTS)
async def test_an_exchanged_link_below_an_allowed_path_of_a_remote_server_is_never_followed(
    place: Path, plant: Path, backend: str, argument: str
) -> None:
    (place / "out").symlink_to(plant)
    before = snapshot(plant)
    with ServerProcess("--backend", backend, "--allow-path", str(place)) as server:
        reach = {"endpoint": server.endpoint, "token": server.token}
        async with sb.remote.session(**reach, read_write_paths=[str(place)]) as one:  # type: ignore[arg-type]
            await race(one, place, argument)
    assert snapshot(plant) == before


@pytest.mark.parametrize("backend", ISOLATED)
async def test_a_remote_server_checks_the_paths_and_limits_of_a_call_itself(
    place: Path, plant: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is one that checks nothing."""
    monkeypatch.setattr(resolve_call, "check_lower", lambda *_: None)
    with ServerProcess("--backend", backend, "--allow-path", str(place)) as server:
        reach = {"endpoint": server.endpoint, "token": server.token}
        limits = sb.Resources(memory="64Mi", open_files=100)
        async with sb.remote.session(**reach, resources=limits) as one:  # type: ignore[arg-type]
            allowed = await one.exec(f"cat {place}/dir/own", read_only_paths=[str(place)])
            assert allowed.stdout == "fine"
            for argument in ARGUMENTS:
                for path in (plant, plant / "secret", place.parent, place / ".." / "plant"):
                    with pytest.raises(sb.PolicyError, match="--allow-path") as caught:
                        await one.exec("true", **{argument: [str(path)]})  # type: ignore[arg-type]
                    assert caught.value.argument == argument
            for more in (sb.Resources(memory="1Gi"), sb.Resources(open_files=101)):
                with pytest.raises(sb.PolicyError, match="more than the session"):
                    await one.exec("true", resources=more)


def mounts_below(pid: int) -> str:
    """The mount tables of every process below ``pid``."""
    found = []
    for one in descendants(pid):
        try:
            found.append(Path(f"/proc/{one}/mountinfo").read_text(encoding="utf-8"))
        except OSError:
            continue  # it has ended
    return "".join(found)


async def test_no_waiting_sandbox_has_the_path_of_a_call(jailed: OpenSession, plant: Path) -> None:
    async with jailed() as jail:
        launcher = Launcher.current().pid
        running = await jail.run("sleep 30", background=True, read_only_paths=[str(plant)])
        assert eventually(lambda: str(plant) in mounts_below(launcher)), "found where it is"
        # Other commands and spares are started while the path is in use.
        for number in range(8):
            await jail.exec(f"echo {number}")
            assert await jail.run_code("print(1)") == "1\n"
        running.kill()
        await running.wait()
        assert eventually(lambda: str(plant) not in mounts_below(launcher))
        assert children_of(launcher), "sandboxes wait"


async def test_processes_of_a_call_do_not_outlive_it(jailed: OpenSession, plant: Path) -> None:
    """A child that keeps a descriptor of the path, to pass it to the next call by a socket."""
    async with jailed() as jail:
        keep = (
            "import os, socket\n"
            f"held = os.open('{plant}', os.O_RDONLY)\n"
            "if os.fork() == 0:\n"
            "    os.setsid()\n"
            "    server = socket.socket(socket.AF_UNIX); server.bind('door'); server.listen()\n"
            "    peer, _ = server.accept()\n"
            "    socket.send_fds(peer, [b'x'], [held])\n"
        )
        take = (
            "import os, socket\n"
            "client = socket.socket(socket.AF_UNIX); client.connect('door')\n"
            "_, fds, _, _ = socket.recv_fds(client, 1, 1)\n"
            "print(os.listdir(fds[0]))\n"
        )
        await jail.run_code(keep, read_only_paths=[str(plant)])
        with pytest.raises(sb.SandboxCommandError):
            await jail.run_code(take)


async def test_many_different_paths_hold_few_descriptors(
    jailed: OpenSession, tmp_path: Path
) -> None:
    places = [tmp_path / str(number) for number in range(24)]
    for path in places:
        path.mkdir()
    async with jailed() as jail:
        await jail.exec("true", read_only_paths=[str(places[0])])
        before = descriptors().total()
        for path in places:
            await jail.exec("true", read_only_paths=[str(path)])
        await asyncio.gather(*(jail.exec("true", read_only_paths=[str(path)]) for path in places))
        assert descriptors().total() < before + 40
