"""Attacks where the sandbox shares the id of the host's root.

So it is when root is the caller and id-mapped mounts are not to be had: files of root are then the
sandbox's own by their owner, and only mounts, Landlock and the filter stand before them.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest
from tests.escape.inside import attack

from union.sandbox._linux import kernel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.conftest import OpenSession

    from union import sandbox as sb

pytestmark = [
    pytest.mark.spec("G2"),
    pytest.mark.needs_root,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root's id is root's: run the tests as root"),
]


@pytest.fixture
async def shared(jailed: OpenSession, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[sb.Session]:
    """A session of root that can neither map mounts nor give files away."""
    for name in ("can_map_mounts", "can_give_away"):
        monkeypatch.setattr(kernel, name, lambda: False)
    async with jailed() as session:
        assert session.isolation.ids == "caller"
        yield session


@pytest.mark.threat(69, 71)
async def test_kernel_settings_stay_closed(shared: sb.Session) -> None:
    """The files of /proc/sys obey the owner's id, not a capability."""
    code = """
    opened = []
    tops = ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/driver", "/proc/scsi", "/sys")
    for top in tops:
        for where, _, names in os.walk(top):
            for name in names:
                path = os.path.join(where, name)
                attempt(os.open, path, os.O_WRONLY | os.O_NONBLOCK) == "ok" and opened.append(path)
    for name in os.listdir("/proc"):
        path = "/proc/" + name
        if not name.isdigit() and os.path.isfile(path):
            attempt(os.open, path, os.O_WRONLY | os.O_NONBLOCK) == "ok" and opened.append(path)
    out["opened"] = opened
    out["control"] = read("/proc/sys/kernel/ostype")
    """
    found = await attack(shared, code)
    assert found["control"] == "Linux\n"
    assert found["opened"] == []


@pytest.mark.threat(7, 24)
async def test_nodes_of_dev_keep_their_metadata(shared: sb.Session) -> None:
    """They are the host's own nodes: a change of mode would be everybody's."""
    code = """
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        found = os.stat("/dev/" + name)
        out[name] = [attempt(os.chmod, "/dev/" + name, stat.S_IMODE(found.st_mode)),
                     attempt(os.utime, "/dev/" + name, ns=(found.st_atime_ns, found.st_mtime_ns))]
    """
    found = await attack(shared, code)
    assert all("ok" not in tries for tries in found.values()), found


@pytest.mark.threat(18)
async def test_no_set_id_file_of_root_can_be_left(shared: sb.Session) -> None:
    """The work dir belongs to root on the host, and what is made in it too."""
    code = """
    write("file")
    out["tries"] = [attempt(os.chmod, "file", 0o4755),
                    attempt(os.open, "new", os.O_CREAT | os.O_WRONLY, 0o4755)]
    out["control"] = attempt(os.chmod, "file", 0o755)
    """
    found = await attack(shared, code)
    assert found == {"tries": ["EPERM", "EPERM"], "control": "ok"}
    made = os.stat(f"{shared.work_dir}/file")
    assert (made.st_uid, stat.S_IMODE(made.st_mode)) == (0, 0o755)


@pytest.mark.threat(32, 35, 36)
async def test_host_processes_of_root_are_out_of_reach(shared: sb.Session) -> None:
    """The owner of the session has the same id."""
    code = """
    import resource
    pid = given["pid"]
    out["kill"] = attempt(os.kill, pid, 0)
    out["limit"] = attempt(resource.prlimit, pid, resource.RLIMIT_NOFILE)
    for name in ("environ", "cwd", "root", "mem", "exe"):
        out[name] = attempt(os.open, f"/proc/{pid}/{name}", os.O_RDONLY)
    """
    if os.getpid() < 10:
        pytest.skip(
            "this process has a number that the sandbox has too: do not run pytest as process 1"
        )
    found = await attack(shared, code, given={"pid": os.getpid()})
    assert "ok" not in found.values(), found
