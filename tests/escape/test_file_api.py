"""Attacks on put and get: races, links, special files, lying sizes, hostile names."""

# ruff: noqa: E501 - an attack program keeps each try on one line
from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED, RACE, SOON_S
from tests.escape.inside import attack, program
from tests.escape.plants import SECRET, snapshot

from union import sandbox as sb

if TYPE_CHECKING:
    from tests.conftest import OpenSession

pytestmark = pytest.mark.spec("E1", "E2")

_REFUSED = (sb.SandboxError, OSError)

# Once for long, where the caller has the most to lose; a moment in every other place, and for every
# other way to open a session: what is raced is the host's side, which they share.
_AT_HOME_AS_ROOT = os.geteuid() == 0 and "SBX_PLACE" not in os.environ
_LONG_RACE_S = 10 * RACE
_SHORT_RACE_S = 2 * RACE

_FLIP = """
print("flipping", flush=True)
end = time.monotonic() + given["seconds"]
while time.monotonic() < end:
    for _ in range(200):
        libc.renameat2(-100, b"d", -100, b"l", 2)
"""
_FLIP_LEAF = """
print("flipping", flush=True)
end = time.monotonic() + given["seconds"]
while time.monotonic() < end:
    os.symlink(given["target"], "next")
    os.rename("next", "leaf")
    write("next", "inside")
    os.rename("next", "leaf")
"""


async def _race(jail: sb.Session, flip: str, target: str, plant: Path, *, seconds: float) -> None:
    """Read and write `target` while the sandbox flips it; nothing outside is touched.

    For so many seconds, and on a busy machine for as many more as it takes to see both sides.
    """
    before = snapshot(plant)
    most = seconds + 30
    proc = await jail.run(
        program(flip, given={"target": str(plant / "secret"), "seconds": most}),
        script_type="python",
        stdout=True,
        timeout_s=most + 15,
    )
    assert await anext(proc.iter_stdout_lines()) == "flipping"
    served = refused = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until or (min(served, refused) <= 20 and proc.returncode is None):
        for call in (jail.get_bytes(target), jail.put_bytes(target, b"inside")):
            try:
                result = await call
            except _REFUSED:
                refused += 1
                continue
            served += 1
            assert result in {b"inside", 6}, "content of another file was served"
    assert proc.returncode is None, "it flipped all the time"
    proc.kill()
    await proc.wait()
    assert served > 20, "the real file is served when its turn comes"
    assert refused > 20, "the link is refused when its turn comes"
    assert snapshot(plant) == before


@pytest.mark.threat(5)
async def test_a_parent_exchanged_for_a_link_never_leads_out(
    jail: sb.Session, plant: Path, request: pytest.FixtureRequest
) -> None:
    """renameat2(EXCHANGE) of a directory and a link while the host puts and gets."""
    await jail.put_bytes("d/secret", b"inside")
    await jail.run(["ln", "-s", str(plant), "l"])
    here = request.path == Path(__file__)  # And not where a server repeats this test.
    long = here and _AT_HOME_AS_ROOT and jail.backend == ISOLATED[0]
    seconds = _LONG_RACE_S if long else _SHORT_RACE_S
    await _race(jail, _FLIP, "d/secret", plant, seconds=seconds)


@pytest.mark.threat(5, 6)
async def test_a_leaf_exchanged_for_a_link_never_leads_out(jail: sb.Session, plant: Path) -> None:
    """The same with the last component, by renames over it."""
    await jail.put_bytes("leaf", b"inside")
    await _race(jail, _FLIP_LEAF, "leaf", plant, seconds=_SHORT_RACE_S)


@pytest.mark.threat(6, 7, 11)
@pytest.mark.parametrize("kind", ["plain", "chained", "dangling", "absolute-in-work", "dir"])
async def test_links_are_refused_both_ways(jail: sb.Session, plant: Path, kind: str) -> None:
    """Also a link that stays inside: get and put follow none."""
    before = snapshot(plant)
    await jail.put_bytes("real", b"real")
    targets = {
        "plain": str(plant / "secret"),
        "chained": "second",
        "dangling": str(plant / "new"),
        "absolute-in-work": f"{jail.work_dir}/real",
        "dir": str(plant),
    }
    code = """
    os.symlink(given["target"], "link")
    os.symlink(given["plain"], "second")
    """
    await attack(jail, code, given={"target": targets[kind], "plain": targets["plain"]})
    path = "link/secret" if kind == "dir" else "link"
    with pytest.raises(_REFUSED):
        await jail.get_bytes(path)
    with pytest.raises(_REFUSED):
        await jail.put_bytes(path, b"changed", mode=0o600)
    assert snapshot(plant) == before
    assert await jail.get_bytes("real") == b"real"


@pytest.mark.threat(8)
@pytest.mark.parametrize(
    "spelling",
    [
        "../plant/secret", "a/../../plant/secret", "{plant}/secret", "{work}/../plant/secret",
        "{work}//..//plant/secret", "./../plant/secret", "{work}x/secret", "file://{plant}/secret",
        "//{plant}/secret", "/proc/self/cwd", "/proc/self/root{plant}/secret", "a/./../../plant/secret",
    ],
)  # fmt: skip
async def test_a_path_that_climbs_out_is_refused(
    jailed: OpenSession, plant: Path, work: str, spelling: str
) -> None:
    """Both ways; a sibling whose name begins like the work dir's too."""
    sibling = Path(f"{work}x")
    sibling.mkdir()
    (sibling / "secret").write_text(SECRET)
    before = snapshot(plant), snapshot(sibling)
    path = spelling.format(plant=plant, work=work)
    async with jailed(host_work_dir=work) as jail:
        with pytest.raises(_REFUSED):
            await jail.get_bytes(path)
        if not spelling.startswith("file:"):  # a relative name like any other, when written
            with pytest.raises(_REFUSED):
                await jail.put_bytes(path, b"changed")
        await jail.put_bytes(f"{work}//a/./file", b"fine")
        assert await jail.get_bytes("a/file") == b"fine"
    assert (snapshot(plant), snapshot(sibling)) == before


@pytest.mark.threat(9)
@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 256, "d/" * 3000 + "f", "", ".", "/"])
async def test_an_impossible_name_is_a_clean_error(
    jailed: OpenSession, work: str, name: str
) -> None:
    """Nothing is cut short, no stray file is left, the session goes on."""
    async with jailed(host_work_dir=work) as jail:
        before = sorted(os.listdir(work))
        for call in (jail.get_bytes(name), jail.put_bytes(name, b"x")):
            with pytest.raises(_REFUSED):
                await call
        assert sorted(os.listdir(work)) == before
        assert await jail.put_bytes("fine", b"1") == 1


@pytest.mark.threat(12)
@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "directory"])
async def test_special_files_are_refused_at_once(jail: sb.Session, kind: str) -> None:
    """Nothing waits for a writer that never comes, or reads a device."""
    code = """
    os.mkfifo("fifo")
    socket.socket(socket.AF_UNIX).bind("socket")
    os.symlink("/dev/zero", "device")
    os.mkdir("directory")
    write("file", "x")
    """
    await attack(jail, code)
    begun = time.monotonic()
    async with asyncio.timeout(SOON_S):
        with pytest.raises(_REFUSED):
            await jail.get_bytes(kind, max_bytes=100)
        with pytest.raises(_REFUSED):
            await jail.put_bytes(kind, b"x")
    assert time.monotonic() - begun < SOON_S
    assert await jail.get_bytes("file") == b"x"


def _rss() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


@pytest.mark.threat(13)
async def test_a_sparse_file_is_refused_without_reading_it(jailed: OpenSession, work: str) -> None:
    """A terabyte of nothing, under a cap and without one."""
    with open(f"{work}/huge", "wb") as file:
        file.truncate(2**40)
    async with jailed(host_work_dir=work) as jail:
        await jail.put_bytes("small", b"s" * 100)
        before, begun = _rss(), time.monotonic()
        for cap in (0, 1000):
            with pytest.raises(_REFUSED):
                await jail.get_bytes("huge", max_bytes=cap)
        assert time.monotonic() - begun < SOON_S
        assert _rss() - before < 16 * 2**20
        assert len(await jail.get_bytes("small", max_bytes=100)) == 100


@pytest.mark.threat(13)
async def test_a_growing_file_never_exceeds_the_cap(jail: sb.Session) -> None:
    """The size is right when checked and wrong when read."""
    code = """
    fd = os.open("grows", os.O_WRONLY | os.O_CREAT, 0o644)
    print("growing", flush=True)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, 0)
        for _ in range(64):
            os.write(fd, b"x" * 4096)
    """
    proc = await jail.run(program(code), script_type="python", stdout=True, timeout_s=20)
    assert await anext(proc.iter_stdout_lines()) == "growing"
    sizes, refused = set(), 0
    while proc.returncode is None:
        try:
            data = await jail.get_bytes("grows", max_bytes=100_000)
        except _REFUSED:
            refused += 1
            await asyncio.sleep(0.001)  # lets the writer run on a machine with few cores
            continue
        assert len(data) <= 100_000
        sizes.add(len(data))
    assert sizes, "the file was served while small"
    assert refused, "the file was refused while large"


@pytest.mark.threat(14)
@pytest.mark.parametrize(
    "name",
    ["new\nline", "-rf", "--help", "sp ace\ttab", "\x1b[2Jx", "caf\u00e9", "\udcff\udcfe", "*"],
)
async def test_an_odd_name_is_the_same_inside_and_outside(jail: sb.Session, name: str) -> None:
    """The same bytes under the same name, in both directions."""
    code = """
    name = bytes.fromhex(given["name"])
    out["content"] = open(b"./" + name, "rb").read().decode()
    open(b"./" + name + b"2", "wb").write(b"from inside")
    """
    assert await jail.put_bytes(name, b"from outside") == 12
    found = await attack(jail, code, given={"name": os.fsencode(name).hex()})
    assert found["content"] == "from outside"
    assert await jail.get_bytes(name + "2") == b"from inside"


@pytest.mark.threat(10)
async def test_a_file_hard_linked_to_the_host_is_replaced_not_written(
    jailed: OpenSession, plant: Path, work: str
) -> None:
    """A link the host left: put makes a new file, the old one keeps its content."""
    os.link(plant / "secret", f"{work}/linked")
    before = (plant / "secret").read_bytes(), (plant / "secret").stat().st_mode
    async with jailed(host_work_dir=work) as jail:
        assert await jail.put_bytes("linked", b"changed", mode=0o600) == 7
        assert await jail.get_bytes("linked") == b"changed"
    assert ((plant / "secret").read_bytes(), (plant / "secret").stat().st_mode) == before


@pytest.mark.threat(12)
async def test_a_socket_of_the_host_in_the_tree_is_not_opened(
    jailed: OpenSession, work: str
) -> None:
    """A socket of the host is refused at once too, and receives nothing."""
    listener = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(work)  # the name of a socket is short
    try:
        listener.bind("s")
    finally:
        os.chdir(here)
    listener.listen()
    listener.settimeout(0.1)
    try:
        async with jailed(host_work_dir=work) as jail:
            with pytest.raises(_REFUSED):
                await jail.get_bytes("s")
        with pytest.raises(TimeoutError):
            listener.accept()
    finally:
        listener.close()
