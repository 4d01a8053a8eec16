"""Nothing is left of something: disk, descriptors, processes, memory. Reported, and then it works.

The limits are put on processes of the test's own, or on file systems that it makes.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import descriptors, eventually, held_by_launcher, session_of

from union import sandbox as sb
from union.sandbox._linux import cgroup
from union.sandbox._linux.launcher import Launcher
from union.sandbox.on_device import _probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.spec("D8", "G4")

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can mount and make groups: run the tests as root"
)


async def works(session: sb.Session) -> bool:
    async with asyncio.timeout(30):
        return (await session.exec("echo fine; exit 3")).returncode == 3


@contextmanager
def limited(pid: int, what: int, soft: int) -> Iterator[None]:
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (soft, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, what, before)


# Descriptors.


@pytest.mark.parametrize("how", ["shell", "filtered", "python", "terminal"])
async def test_any_number_of_descriptors_left_in_the_host(how: str) -> None:
    """With each number from none upwards: an error that names it, or the right result."""
    options: dict[str, Any] = {"stdout": True}
    if how == "filtered":
        options |= {"network_mode": "allowlist", "network_allowlist": ["127.0.0.1"]}
    elif how == "python":
        options |= {"script_type": "python"}
    elif how == "terminal":
        options |= {"pty": True}
    text = "print('hi')" if how == "python" else "echo hi"

    async def attempt(session: sb.Session) -> str:
        try:
            async with asyncio.timeout(40):
                proc = await session.run(text, **options)
                out, _ = await proc.communicate()
        except sb.SandboxExecutionError as exc:
            assert "open files" in str(exc), exc  # noqa: PT017 - more descriptors may do
            return "refused"
        assert (proc.returncode, out.strip()) == (0, b"hi")
        return "worked"

    widest = {"network_mode": "allowlist", "network_allowlist": ["127.0.0.1"]}
    async with session_of("userns", warm=0, **widest) as session:
        assert await attempt(session) == "worked"
        await asyncio.sleep(0.2)
        before = sum(descriptors().values())
        seen = []
        for left in range(18):
            with limited(0, resource.RLIMIT_NOFILE, _used() + left):
                seen.append(await attempt(session))
            assert await attempt(session) == "worked", "and it recovers"
        assert set(seen) == {"refused", "worked"}, seen
        await asyncio.sleep(0)  # waiters are woken first, then the run is closed
        assert eventually(lambda: sum(descriptors().values()) <= before)


def _used() -> int:
    """The limit at which not one more descriptor can be made: numbers are given from below."""
    first = os.open("/dev/null", os.O_RDONLY)
    os.close(first)
    return first


def is_true(exc: sb.SandboxError, left: int) -> bool:
    # Without even one for the socket of a new sandbox, the reason cannot be sent to the host.
    return "open files" in str(exc) or (left < 2 and "ended" in str(exc))


async def test_no_descriptor_left_in_the_launcher() -> None:
    async with session_of("userns", warm=0) as session:
        assert await works(session)
        pid = Launcher.current().pid
        # Without a sandbox there is no network either.
        assert eventually(lambda: not held_by_launcher()["net"])
        held = held_by_launcher().total()
        for left in range(6):
            with limited(pid, resource.RLIMIT_NOFILE, held + left):
                try:
                    assert await works(session)
                except sb.SandboxExecutionError as exc:
                    assert is_true(exc, left)  # noqa: PT017 - more may do
                try:
                    async with session_of("userns", warm=0) as another:
                        assert await works(another)
                except (sb.SandboxExecutionError, sb.BackendUnavailableError) as exc:
                    assert is_true(exc, left)  # noqa: PT017 - more may do
            assert await works(session)
        assert Launcher.current().pid == pid, "the launcher and its other sessions live on"
        assert eventually(lambda: held_by_launcher().total() == held)


# Memory and processes.


async def test_no_memory_for_the_launcher() -> None:
    async with session_of("userns", warm=0) as session:
        assert await works(session)
        pid = Launcher.current().pid
        with limited(pid, resource.RLIMIT_AS, 4096):
            _probe.verified.clear()
            with pytest.raises(sb.SandboxError, match=r"[Cc]annot allocate memory"):
                await works(session)
            with pytest.raises(sb.SandboxError, match=r"[Cc]annot allocate memory"):
                await session_of("userns", warm=0).open()
        assert await works(session)
        assert Launcher.current().pid == pid


@needs_root
async def test_no_process_left(tmp_path: Path) -> None:
    place = _pids_group()
    try:
        done = subprocess.run(
            [sys.executable, "-c", NO_PIDS, str(place)],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["open"][0] == "BackendUnavailableError"
        assert "no more processes may be started" in report["open"][1]
        assert report["run"][0] == "SandboxExecutionError"
        assert os.strerror(errno.EAGAIN) in report["run"][1]
        assert (report["before"], report["after"]) == (3, 3)
    finally:
        assert eventually(lambda: _removed(place))


def _pids_group() -> Path:
    """A control group of this test's own that can count processes."""
    for base in ("/sys/fs/cgroup/pids", "/sys/fs/cgroup"):
        place = Path(base) / f"test-{os.getpid()}"
        try:
            place.mkdir()
        except OSError:
            continue
        if (place / "pids.max").exists():
            return place
        place.rmdir()
    pytest.skip(
        "no control group counts processes here: make /sys/fs/cgroup/pids writable (run as root)"
    )


def _removed(place: Path) -> bool:
    try:
        place.rmdir()
    except OSError:
        return not place.exists()
    return True


NO_PIDS = """
import asyncio, json, os, sys
from pathlib import Path
from union import sandbox as sb
from union.sandbox.on_device import _probe

async def main(place):
    report = {}
    async with sb.on_device.session(backend="userns", warm=0) as session:
        report["before"] = (await session.exec("exit 3")).returncode
        me = os.getpid()
        launcher = int(Path(f"/proc/{me}/task/{me}/children").read_text().split()[0])
        for pid in (me, launcher):
            (place / "cgroup.procs").write_text(str(pid))
        await asyncio.to_thread(int)  # a thread of ours is a process too, to this limit
        (place / "pids.max").write_text((place / "pids.current").read_text())
        try:
            await session.exec("exit 3")
        except sb.SandboxError as exc:
            report["run"] = [type(exc).__name__, str(exc)]
        _probe.verified.clear()
        try:
            await sb.on_device.session(backend="userns", warm=0).open()
        except sb.SandboxError as exc:
            report["open"] = [type(exc).__name__, str(exc)]
        (place / "pids.max").write_text("max")
        report["after"] = (await session.exec("exit 3")).returncode
    print(json.dumps(report))

asyncio.run(main(Path(sys.argv[1])))
"""


# Disk.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,mode=0777", "tmpfs", str(place)], check=False
    )
    if done.returncode != 0:
        pytest.skip("no tmpfs can be mounted here: allow CAP_SYS_ADMIN, as on a machine itself")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@needs_root
@pytest.mark.parametrize("backend", ["userns", "bubblewrap"])
async def test_disk_full_for_the_work_dir(backend: str, small_disk: Path) -> None:
    async with session_of(backend, host_work_dir=str(small_disk)) as session:
        assert await works(session)
        report = await session.exec("head -c 1000000 /dev/zero > all")
        assert report.returncode == 1
        assert os.strerror(errno.ENOSPC) in report.stderr
        for _ in range(2):
            with pytest.raises(OSError) as failed:
                await session.put_bytes("more", bytes(200_000))
            assert isinstance(failed.value, sb.SandboxError)
            assert failed.value.errno == errno.ENOSPC
        assert {info.name for info in await session.list_dir()} <= {"all", ".sandbox-venv"}, (
            "no remains"
        )
        assert await session.run_code("print(1)") == "1\n"
        assert await works(session)
        await session.remove("all")
        assert await session.put_bytes("more", bytes(100_000)) == 100_000


async def test_file_size_limit_of_the_host() -> None:
    async with session_of("userns") as session:
        assert await works(session)
        with limited(0, resource.RLIMIT_FSIZE, 200_000):
            with pytest.raises(OSError) as failed:
                await session.put_bytes("large", bytes(300_000))
            assert isinstance(failed.value, sb.SandboxError)
            assert failed.value.errno == errno.EFBIG
            assert not await session.exists("large")
            assert await session.put_bytes("small", bytes(100)) == 100
        assert await session.put_bytes("large", bytes(300_000)) == 300_000
        assert await works(session)


ROOT = Path(__file__).resolve().parents[2]
FULL = "mount -t tmpfs -o size=64k,nr_inodes=32 tmpfs {0} && head -c 1000000 /dev/zero > {0}/all"
PLACES: dict[str, tuple[str, str]] = {
    # What the shell does in a mount namespace of its own; what the program then says.
    "/var/tmp is read-only": ("mount --bind -o ro /var/tmp /var/tmp", "worked"),
    "/tmp is full": (FULL.format("/tmp"), "worked"),
    "/var/tmp is full": (FULL.format("/var/tmp"), "No space left on device"),
    "both are read-only": (
        "for at in /var/tmp /tmp; do mount --bind -o ro $at $at; done",
        "no work dir could be created",
    ),
}
PLACED = """
import asyncio, os
from union import sandbox as sb

async def main():
    try:
        async with sb.on_device.session(backend="userns") as session:
            done = await session.exec("echo worked")
            print(done.returncode, done.stdout)
    except sb.SandboxError as exc:
        print(exc.code, exc)
    # Another place for the work dir is all that is needed.
    async with sb.on_device.session(backend="userns", host_work_dir="/mnt") as session:
        print((await session.exec("echo elsewhere")).stdout)

asyncio.run(main())
"""


@needs_root
@pytest.mark.parametrize("what", PLACES)
def test_places_for_work_dirs(what: str) -> None:
    prepare, wanted = PLACES[what]
    # This project may lie below the place that is covered; then it is shown there all the same.
    keep = 'mkdir -p /run/kept && mount --rbind "$2" /run/kept'
    show = '{ [ -e "$2" ] || { mkdir -p "$2" && mount --rbind /run/kept "$2"; }; }'
    script = (
        f"mount -t tmpfs tmpfs /run && {keep} && {{ {prepare} 2>/dev/null; true; }} && {show} &&"
        ' mount -t tmpfs tmpfs /mnt && cd /proc && exec "$0" -c "$1"'
    )
    command = ["unshare", "--mount", "sh", "-c", script, sys.executable, PLACED, str(ROOT)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if "unshare" in done.stderr:
        pytest.skip(
            "no mount namespace can be made here: allow the container CAP_SYS_ADMIN and unshare(2)"
        )
    assert done.returncode == 0, done.stderr
    assert wanted in done.stdout, done.stdout
    assert "elsewhere" in done.stdout


# What is remembered must not have been learnt while nothing could be.


async def test_no_descriptor_is_not_taken_for_no_control_groups() -> None:
    found: Callable[[], cgroup.Hierarchy | None] = cgroup.hierarchy
    usual = found()
    cgroup.hierarchy.cache_clear()
    with limited(0, resource.RLIMIT_NOFILE, _used()), pytest.raises(OSError) as failed:
        found()
    assert failed.value.errno == errno.EMFILE
    assert found() == usual
