"""Attacks on paths that the caller names: below a work dir, or below what a server lets be shown.

Sandboxed code can write there, so it can put a link in the way of the next session's mounts.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED, RACE
from tests.escape.plants import SECRET, snapshot
from tests.servers import ServerProcess

from union import sandbox as sb
from union.sandbox.on_device._workdir import WorkDir, WorkPlace

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import OpenSession

_ARGUMENTS = ("read_only_paths", "read_write_paths")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory `data` with a work dir and, beside it, what no sandbox is shown."""
    top = tmp_path / "data"
    (top / "work" / "a" / "data").mkdir(parents=True)
    (top / "work" / "a" / "data" / "own").write_text("fine")
    (top / "secret").write_text(SECRET)
    for path in (top / "work", top / "work" / "a", top / "work" / "a" / "data"):
        path.chmod(0o777)
    return top


# In the sandbox as on the host, `a/data` then means the directory that holds the work dir: a name
# that exists on both sides, so that nothing but a check stops the mount.
# The build of another sandbox may create the directory again meanwhile, so this is retried.
_PLANT = "mv a b && until ln -sT {top} a; do mv a c$((n=n+1)); done"


@pytest.mark.threat(17, 27)
@pytest.mark.parametrize("argument", _ARGUMENTS)
async def test_a_link_left_in_the_work_dir_does_not_lead_the_next_mount_out(
    jailed: OpenSession, shared: Path, argument: str
) -> None:
    """The parent of a path that is shown below the work dir is renamed, and a link put there."""
    options = {"host_work_dir": str(shared / "work"), argument: [str(shared / "work/a/data")]}
    look = f"cat a/data/own; cat {shared}/secret a/data/secret; echo changed > {shared}/secret"
    async with jailed(**options) as jail:
        assert (await jail.exec(look)).stdout == "fine"
        async with jailed(host_work_dir=str(shared / "work")) as other:
            # The work dir of both; this session is not shown the path, so nothing holds it.
            assert (await other.exec(_PLANT.format(top=shared.parent))).returncode == 0
        # The first session may be unable to go on, and no more than that.
        with contextlib.suppress(sb.SandboxError):
            assert SECRET not in (await jail.exec(look)).stdout
    assert os.path.samefile(shared / "work/a/data", shared), "the plant is there"
    with pytest.raises(sb.PolicyError, match="leads through a link in the work dir"):
        await jailed(**options).open()
    assert (shared / "secret").read_text() == SECRET
    (shared / "work" / "a").unlink()
    (shared / "work" / "b").rename(shared / "work" / "a")
    async with jailed(**options) as jail:
        assert (await jail.exec(look)).stdout == "fine"
    assert (shared / "secret").read_text() == SECRET


@pytest.mark.threat(17, 27)
@pytest.mark.parametrize("link", ["data", "./x/../data", "b"])
async def test_a_path_below_the_work_dir_is_no_link_at_any_place(
    jailed: OpenSession, shared: Path, link: str
) -> None:
    """The last part of it, by another spelling, and a link that stays inside."""
    work = shared / "work"
    (work / "x").mkdir()
    (work / "data").symlink_to(shared)
    (work / "b").symlink_to("a")
    with pytest.raises(sb.PolicyError, match="link in the work dir"):
        await jailed(host_work_dir=str(work), read_only_paths=[f"{work}/{link}"]).open()
    # By another name of the work dir it is the same.
    (shared / "alias").symlink_to("work")
    with pytest.raises(sb.PolicyError, match="link in the work dir"):
        await jailed(host_work_dir=str(work), read_only_paths=[f"{shared}/alias/{link}"]).open()
    async with jailed(host_work_dir=str(work), read_only_paths=[f"{work}/a/data"]) as jail:
        assert (await jail.exec("cat a/data/own; echo x > a/data/own")).stdout == "fine"
    assert (work / "a/data/own").read_text() == "fine"


_FLIP = """
import ctypes, os, time
libc = ctypes.CDLL(None)
os.chdir({place!r})
print("flipping", flush=True)
end = time.monotonic() + 20
while time.monotonic() < end:
    libc.renameat2(-100, b"x", -100, b"y", 2)
"""


@pytest.mark.threat(5, 27, 122)
@pytest.mark.parametrize("argument", [*_ARGUMENTS, "host_work_dir"])
@pytest.mark.parametrize("backend", ISOLATED)
async def test_remote_clients_cannot_race_the_check_of_a_path(
    tmp_path: Path, plant: Path, backend: str, argument: str
) -> None:
    """One session exchanges a directory for a link while others are opened on it."""
    allowed = tmp_path / "allowed"
    (allowed / "x").mkdir(parents=True)
    (allowed / "y").symlink_to(plant)
    for path in (allowed, allowed / "x"):
        path.chmod(0o777)
    before = snapshot(plant)
    path = str(allowed / "x")
    value = path if argument == "host_work_dir" else [path]
    seen: Counter[str] = Counter()
    with ServerProcess("--backend", backend, "--allow-path", str(allowed)) as server:

        def session(**options: object) -> sb.Session:
            reach = {"endpoint": server.endpoint, "token": server.token, "lazy": False}
            return sb.remote.session(**reach, **options)  # type: ignore[arg-type]

        async with session(read_write_paths=[str(allowed)]) as one:
            proc = await one.run(
                _FLIP.format(place=str(allowed)), script_type="python", stdout=True
            )
            assert await anext(proc.iter_stdout_lines()) == "flipping"
            end = time.monotonic() + RACE
            while time.monotonic() < end or not (seen["shown"] and seen["refused"]):
                assert time.monotonic() < end + 20, seen
                try:
                    async with session(**{argument: value}) as two:
                        result = await two.exec(f"cat {path}/secret; echo x > {path}/secret")
                        assert SECRET not in result.stdout
                        seen["shown"] += 1
                except sb.SandboxError:
                    seen["refused"] += 1
    assert snapshot(plant) == before


@pytest.mark.threat(27, 122)
def test_a_work_dir_is_judged_by_what_is_held(tmp_path: Path, plant: Path) -> None:
    """The same without chance: the name means the plant when it is opened."""
    allowed = tmp_path / "allowed"
    (allowed / "own").mkdir(parents=True)
    (allowed / "out").symlink_to(plant)
    place = WorkPlace(str(tmp_path), allowed=(str(allowed),))
    with pytest.raises(sb.PolicyError, match="not among the paths"):
        WorkDir(str(allowed / "out"), place)
    held = WorkDir(str(allowed / "own"), place)
    assert held.source == str(allowed / "own")
    held.remove()
    WorkDir(str(allowed / "out"), WorkPlace(str(tmp_path))).remove()
    assert (plant / "secret").read_text() == SECRET
