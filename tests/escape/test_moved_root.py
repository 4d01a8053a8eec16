"""Attacks on a root that was moved over the caller's because pivot_root is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.conftest import session_of
from tests.escape.inside import attack, outside
from tests.escape.plants import SECRET

from union.sandbox.on_device import _probe

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from union import sandbox as sb

MNT_DETACH, MS_MOVE, CLONE_NEWNS, CLONE_NEWUSER = 2, 8192, 0x20000, 0x10000000

# Each function tries to leave the root one way, and reads a file as the proof.
CLIMB = f"""
def same(path):
    here, there = os.stat("/"), os.stat(path)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

def secret():
    try:
        return read(given["secret"])
    except OSError as exc:
        return errno.errorcode[exc.errno]

def uncover(namespace):
    return [call("umount2", b"/", {MNT_DETACH}), attempt(os.fchdir, namespace),
            call("setns", namespace, {CLONE_NEWNS})]
"""

TRIES = f"""
os.makedirs("below", exist_ok=True)
top = os.open("/", os.O_RDONLY)
out["before"] = secret()
out["dots"] = same("/../../..") and same("/proc/self/root/../..")
out["chroot"] = call("chroot", b"below")
os.fchdir(top)
os.chdir("../../../../..")
out["still at the top"] = same(".")
out["uncover"] = uncover(os.open("/proc/self/ns/mnt", os.O_RDONLY))
out["move"] = call("mount", b"/tmp", b"/", None, {MS_MOVE}, None)
out["tree"] = call("open_tree", top, b"", 1 | 0x1000)
out["pivot"] = call("pivot_root", b".", b".")
out["namespace"] = call("unshare", {CLONE_NEWUSER | CLONE_NEWNS})
out["by handle"] = call("open_by_handle_at", top, bytes(64), 0)
out["after"] = secret()
out["roots"] = [line.split()[4] for line in read("/proc/self/mountinfo").splitlines()].count("/")
"""

# The same root, made by hand by a process that keeps its capabilities and has no filter.
CONTROL = f"""
assert call("unshare", {CLONE_NEWUSER | CLONE_NEWNS}) == "ok"
namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY)
assert call("mount", None, b"/", None, 16384 | 262144, None) == "ok"  # private, recursively
assert call("mount", b"new", b"/usr", b"tmpfs", 0, None) == "ok"
os.chdir("/usr")
assert call("mount", b".", b"/", None, {MS_MOVE}, None) == "ok"
assert call("chroot", b".") == "ok"
os.chdir("/")
out["before"] = secret()
uncover(namespace)
out["after"] = secret()
"""


@pytest.fixture
async def moved(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[sb.Session]:
    """A session whose root is entered as where pivot_root is refused."""
    monkeypatch.setitem(_probe._known, "userns", _probe.HostFeatures(pivot=False))
    async with session_of("userns") as session:
        yield session


@pytest.mark.threat(56)
@pytest.mark.spec("G2")
async def test_a_moved_root_cannot_be_left(moved: sb.Session, plant: Path) -> None:
    assert moved.isolation.root == "move"
    found = await attack(moved, CLIMB + TRIES, given={"secret": str(plant / "secret")})
    assert found.pop("before") == found.pop("after") == "ENOENT"
    assert found.pop("dots") is True
    assert found.pop("still at the top") is True
    assert found.pop("roots") == 1
    umounted, _, joined = found.pop("uncover")
    refused = {**found, "umount": umounted, "setns": joined}
    assert set(refused.values()) == {"EPERM"}, refused


@pytest.mark.threat(56)
@pytest.mark.spec("G2")
async def test_the_control_is_that_a_capability_uncovers_the_callers_root(plant: Path) -> None:
    found = await outside(CLIMB + CONTROL, given={"secret": str(plant / "secret")})
    assert found == {"before": "ENOENT", "after": SECRET}


@pytest.mark.threat(114)
@pytest.mark.spec("B9", "G1")
async def test_strict_refuses_a_moved_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strict asks for pivot_root again, whatever was found before; here it is allowed."""
    monkeypatch.setitem(_probe._known, "userns", _probe.HostFeatures(pivot=False))
    async with session_of("userns") as session:
        assert session.isolation.root == "move"
    if session.isolation.proc == "inherited":
        pytest.skip(
            "a masked /proc is refused first here: run where /proc is whole (procMount: Unmasked)"
        )
    async with session_of("userns", strict=True) as session:
        assert session.isolation.root == "pivot"
