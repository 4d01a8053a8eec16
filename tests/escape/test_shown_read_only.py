"""Attacks on visible but read-only paths: the owner's packages, devices, file handles."""

# ruff: noqa: E501 - an attack program keeps each try on one line
from __future__ import annotations

import ctypes
import os
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.escape.inside import attack
from tests.escape.plants import SECRET, snapshot

if TYPE_CHECKING:
    from tests.conftest import OpenSession

    from union import sandbox as sb

pytestmark = pytest.mark.spec("G2", "E4")


@pytest.mark.threat(24, 40)
async def test_no_device_node_of_the_host_opens(jail: sb.Session) -> None:
    """Only the six harmless nodes are there, and they work."""
    code = """
    out["names"] = sorted(os.listdir("/dev"))
    for name in given["host"]:
        out[name] = attempt(os.open, f"/dev/{name}", os.O_RDONLY | os.O_NONBLOCK)
    write("/dev/null", "x", os.O_WRONLY)
    out["control"] = [len(os.urandom(4)), open("/dev/zero", "rb").read(3).hex(),
                      attempt(write, "/dev/full", "x", os.O_WRONLY), len(open("/dev/urandom", "rb").read(2))]
    """
    kept = {"null", "zero", "full", "random", "urandom", "tty"}
    links = {"fd", "stdin", "stdout", "stderr", "shm", "pts"}  # the last is empty
    wanted = {"sda", "vda", "nvme0n1", "kvm", "fuse", "net/tun", "vsock", "loop-control", "console",
              "mem", "kmsg", "port", "ptmx", "pts/ptmx", "pts/0", "tty0", "uinput", "mqueue"}  # fmt: skip
    host = sorted((wanted | set(os.listdir("/dev"))) - kept - links)
    found = await attack(jail, code, given={"host": host})
    assert set(found.pop("names")) == kept | links | {"ptmx"}  # a link that leads nowhere
    assert found.pop("control") == [4, "000000", "ENOSPC", 2]
    assert set(found.values()) == {"ENOENT"}, found


@pytest.mark.threat(25)
async def test_a_device_node_cannot_be_made(jail: sb.Session) -> None:
    """Nor a white-out; a FIFO can."""
    code = """
    for name, device in (("mem", (1, 1)), ("disk", (254, 0)), ("sda", (8, 0)), ("null", (1, 3)), ("white", (0, 0))):
        for place in (".", "/tmp", "/dev/shm", "/dev"):
            for kind in (stat.S_IFCHR, stat.S_IFBLK):
                path = f"{place}/{name}"
                out[f"{path} {kind}"] = attempt(os.mknod, path, kind | 0o666, os.makedev(*device))
                os.path.lexists(path) and out.update({path: "exists"} if place != "/dev" else {})
    os.mkfifo("fifo")
    out["control"] = stat.S_ISFIFO(os.stat("fifo").st_mode)
    """
    found = await attack(jail, code)
    assert found.pop("control") is True
    assert not {"ok", "exists"} & set(found.values()), found


class _Handle(ctypes.Structure):
    _fields_ = (("size", ctypes.c_uint), ("kind", ctypes.c_int), ("data", ctypes.c_ubyte * 128))


@pytest.mark.threat(26)
async def test_a_handle_made_outside_does_not_open_inside(
    jailed: OpenSession, plant: Path, work: str
) -> None:
    """The handle is real: the host made it, and its root can open it."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle, mount = _Handle(size=128), ctypes.c_int()
    path = os.fsencode(plant / "secret")
    made = libc.name_to_handle_at(-100, path, ctypes.byref(handle), ctypes.byref(mount), 0)
    size = 8 + (handle.size if made == 0 else 8)
    code = """
    blob = bytes.fromhex(given["handle"])
    for place in (".", "/usr", "/tmp"):
        at = os.open(place, os.O_RDONLY)
        out[place] = call("open_by_handle_at", at, blob, os.O_RDONLY)
    room = ctypes.create_string_buffer(struct.pack("I", 128) + bytes(132))
    out["make"] = call("name_to_handle_at", -100, b"own", room, ctypes.create_string_buffer(8), 0)
    write("own")
    """
    async with jailed(host_work_dir=work) as jail:
        given = {"handle": bytes(handle)[:size].hex()}
        assert set((await attack(jail, code, given=given)).values()) == {"EPERM"}
    assert Path(work, "own").exists()
    if made == 0 and os.geteuid() == 0:
        at = os.open(work, os.O_RDONLY)
        fd = libc.open_by_handle_at(at, ctypes.byref(handle), os.O_RDONLY)
        os.close(at)
        if fd >= 0:
            assert os.read(fd, 100) == SECRET.encode()
            os.close(fd)


_CHANGES = """
top, file = given["path"], given["path"] + "/secret"
fd = os.open(file, os.O_RDONLY)
import mmap
out["tries"] = {
    "write": attempt(write, file, "x", os.O_WRONLY), "append": attempt(write, file, "x", os.O_WRONLY | os.O_APPEND),
    "create": attempt(write, top + "/new"), "truncate": attempt(os.truncate, file, 0),
    "trunc": attempt(os.open, file, os.O_RDONLY | os.O_TRUNC), "tmpfile": attempt(os.open, top, os.O_TMPFILE | os.O_RDWR),
    "reopen": attempt(write, f"/proc/self/fd/{fd}", "x", os.O_WRONLY),
    "fchmod": attempt(os.fchmod, fd, 0o600), "chmod": attempt(os.chmod, file, 0o600),
    "chown": attempt(os.chown, file, os.getuid(), os.getgid()), "utime": attempt(os.utime, file, (1, 1)),
    "setxattr": attempt(os.setxattr, file, "user.x", b"x"), "mkdir": attempt(os.mkdir, top + "/d"),
    "symlink": attempt(os.symlink, "x", top + "/l"), "link": attempt(os.link, file, top + "/h"),
    "fifo": attempt(os.mkfifo, top + "/f"), "bind": attempt(write, top + "/inner/deep", "x", os.O_RDWR),
    "mmap": attempt(mmap.mmap, fd, 4, mmap.MAP_SHARED, mmap.PROT_WRITE),
    "remount": call("mount", b"none", top.encode(), None, 4096 | 32, None),
    "umount": call("umount2", top.encode(), 2),
    "setattr": call("mount_setattr", -100, top.encode(), 0, struct.pack("QQQQ", 0, 1, 0, 0), 32),
    "rename": attempt(os.rename, file, top + "/moved"), "replace": attempt(os.rename, top, top + "-gone"),
    "rmdir": attempt(os.rmdir, top + "/empty"), "unlink": attempt(os.unlink, file),
}
out["read"] = read(file) if os.path.exists(file) else ""
"""


@pytest.mark.threat(28)
@pytest.mark.spec("E4")
async def test_a_read_only_path_cannot_be_changed(jailed: OpenSession, plant: Path) -> None:
    """Two dozen ways; the same path given for writing is the control."""
    (plant / "empty").mkdir()
    before = snapshot(plant)
    async with jailed(read_only_paths=[str(plant)]) as jail:
        found = await attack(jail, _CHANGES, given={"path": str(plant)})
    assert found["read"] == SECRET
    assert "ok" not in found["tries"].values(), found
    assert len(found["tries"]) >= 10
    assert snapshot(plant) == before
    async with jailed(read_write_paths=[str(plant)]) as jail:
        found = (await attack(jail, _CHANGES, given={"path": str(plant)}))["tries"]
    done = {name for name, result in found.items() if result == "ok"}
    assert done >= {"write", "append", "create", "truncate", "mkdir", "symlink", "rename"}, found
    assert found["remount"] == found["umount"] == found["setattr"] == "EPERM"


@pytest.mark.threat(29)
@pytest.mark.spec("B5")
async def test_the_owners_packages_cannot_be_changed(jail: sb.Session) -> None:
    """The interpreter's own library dirs are there to be read only."""
    paths = sysconfig.get_paths()
    dirs = sorted({paths["purelib"], paths["platlib"], paths["stdlib"], paths["scripts"]})
    code = """
    for place in given["dirs"]:
        first = os.path.join(place, sorted(os.listdir(place))[0])
        out[place] = [attempt(write, place + "/plant.pth"), attempt(write, place + "/sitecustomize.py"),
                      attempt(os.mkdir, place + "/plant"), attempt(os.utime, place), attempt(os.utime, first),
                      attempt(os.chmod, first, 0o777), attempt(os.rename, first, first + "2")]
    """
    found = await attack(jail, code, given={"dirs": dirs})
    assert sorted(found) == dirs
    assert all("ok" not in tries for tries in found.values()), found
    for place in dirs:
        assert not Path(place, "plant.pth").exists()
    assert await jail.run_code("import pytest; print('seen')") == "seen\n"
