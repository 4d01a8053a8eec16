"""Attacks by resource exhaustion: processes, memory, scratch space, files, output."""

# ruff: noqa: E501 - an attack program keeps each try on one line
from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import pytest
from tests.conftest import SOON_S, OpenSession, eventually, sandbox_processes
from tests.escape.inside import attack, program

from union import sandbox as sb
from union.sandbox._core.resources import Resources
from union.sandbox.constants import (
    DEFAULT_OPEN_FILES,
    DEFAULT_SHM_MIB,
    DEFAULT_TMP_MIB,
    UNREAD_STREAM_BYTES,
)

pytestmark = pytest.mark.spec("G3")
# Alone are fork bombs, full memory and endless output: they slow down whatever runs beside them.
_MIB = 2**20


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.threat(101)
@pytest.mark.slow
@pytest.mark.alone
async def test_a_fork_bomb_is_stopped(jail: sb.Session) -> None:
    """Well below what the host would notice; the session goes on."""
    code = """
    count = 0
    try:
        while count < 2000:
            if os.fork() == 0:
                time.sleep(30)
                os._exit(0)
            count += 1
    except OSError as exc:
        out["error"] = errno.errorcode[exc.errno]
    out["count"] = count
    """
    enforced = dict(jail.isolation.limits)["processes"]
    if enforced == "none":
        pytest.skip("nothing limits processes here: make a pids control group writable")
    found = await attack(jail, code)
    assert found["error"] == "EAGAIN"
    assert 100 < found["count"] < 600
    assert (await jail.exec("echo alive")).stdout == "alive\n"
    assert eventually(lambda: not sandbox_processes())


@pytest.mark.threat(101, 107)
@pytest.mark.slow
@pytest.mark.alone
async def test_a_classic_fork_bomb_ends_with_its_time(jail: sb.Session) -> None:
    """The shell's own; nothing of it is left."""
    if dict(jail.isolation.limits)["processes"] == "none":
        pytest.skip("nothing limits processes here: make a pids control group writable")
    begun = time.monotonic()
    proc = await jail.run(
        "bomb() { bomb | bomb & }; bomb; sleep 30", timeout_s=1, stderr=sb.DEVNULL
    )
    assert proc.termination_reason == "timeout"
    assert time.monotonic() - begun < SOON_S
    assert eventually(lambda: not sandbox_processes())
    assert (await jail.exec("echo alive")).stdout == "alive\n"


@pytest.mark.threat(101)
async def test_the_process_limit_can_be_set(jailed: OpenSession) -> None:
    """Sixteen: fifteen beside the first work, a hundred do not."""
    async with jailed(resources=Resources(processes=16)) as jail:
        if dict(jail.isolation.limits)["processes"] == "none":
            pytest.skip("nothing limits processes here: make a pids control group writable")
        code = """
        kids = []
        try:
            for _ in range(100):
                kids.append(subprocess.Popen(["sleep", "20"]))
        except OSError as exc:
            out["error"] = errno.errorcode[exc.errno]
        out["count"] = len(kids)
        """
        found = await attack(jail, code)
        assert found == {"error": "EAGAIN", "count": 15}


_EAT = """
kids = []
for _ in range(given["children"]):
    kids.append(subprocess.Popen([sys.executable, "-c", f"b = bytearray({given['each']}); print(1, flush=True); input()"],
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE))
for kid in kids:
    kid.stdout.readline()  # it has its memory, or is dead
time.sleep(0.2)
out["alive"] = sum(kid.poll() is None for kid in kids)
"""


@pytest.mark.threat(102)
@pytest.mark.slow
@pytest.mark.alone
async def test_memory_is_limited_over_the_whole_tree(jailed: OpenSession) -> None:
    """Six children, each within the limit; two are the control."""
    async with jailed(resources=Resources(memory="256Mi")) as jail:
        fine = await attack(jail, _EAT, given={"children": 2, "each": 64 * _MIB})
        assert fine == {"alive": 2}
        code = program(_EAT, given={"children": 6, "each": 64 * _MIB})
        result = await jail.exec(code, script_type="python", timeout_s=15)
        survived = json.loads(result.stdout)["alive"] if result.ok else 0
        assert survived < 4, result
        if not result.ok:
            assert result.termination_reason == "oom"
        assert (await jail.exec("echo alive")).stdout == "alive\n"


@pytest.mark.threat(102, 103)
async def test_one_process_beyond_the_limit_is_reported_as_out_of_memory(
    jailed: OpenSession,
) -> None:
    async with jailed(resources=Resources(memory="128Mi")) as jail:
        result = await jail.exec("b = bytearray(400 << 20)", script_type="python", timeout_s=15)
        assert (result.returncode, result.termination_reason) == (137, "oom")


@pytest.mark.threat(103)
@pytest.mark.parametrize("place, size", [("/tmp", 24), ("/dev/shm", 12)])
async def test_scratch_space_is_bounded(jailed: OpenSession, place: str, size: int) -> None:
    """By bytes, as requested, and by number of files."""
    code = """
    written = 0
    try:
        with open(given["place"] + "/fill", "wb", buffering=0) as file:
            while written < 1 << 30:
                written += file.write(bytes(1 << 20))
    except OSError as exc:
        out["error"] = errno.errorcode[exc.errno]
    out["written"] = written
    os.unlink(given["place"] + "/fill")
    out["inodes"] = os.statvfs(given["place"]).f_files
    """
    async with jailed(resources=Resources(tmp="24Mi", shm="12Mi")) as jail:
        found = await attack(jail, code, given={"place": place})
        assert found["error"] == "ENOSPC"
        assert (size - 1) * _MIB <= found["written"] <= size * _MIB
        assert 1000 < found["inodes"] <= 65536


@pytest.mark.threat(103, 104)
async def test_scratch_space_is_bounded_by_default(jail: sb.Session) -> None:
    """The root, the script dir and every tmpfs have a size."""
    code = """
    for path in ("/tmp", "/dev/shm", "/run/sandbox", "/"):
        found = os.statvfs(path)
        out[path] = found.f_blocks * found.f_frsize >> 20
    """
    found = await attack(jail, code)
    assert (found["/tmp"], found["/dev/shm"]) == (DEFAULT_TMP_MIB, DEFAULT_SHM_MIB)
    assert 0 < found["/"] <= 1
    assert 0 < found["/run/sandbox"] <= 256


@pytest.mark.threat(104)
async def test_one_file_cannot_exceed_its_limit(jailed: OpenSession, work: str) -> None:
    """Writing, growing by truncate and by fallocate."""
    code = """
    def fill(size):
        with open("big", "wb", buffering=0) as file:
            for _ in range(size):
                file.write(bytes(1 << 20))
    out["write"] = attempt(fill, 12)
    out["truncate"] = attempt(os.truncate, "big", 1 << 40)
    out["fallocate"] = attempt(lambda: os.posix_fallocate(os.open("big", os.O_RDWR), 0, 1 << 30))
    out["control"] = attempt(fill, 4)
    """
    async with jailed(host_work_dir=work, resources=Resources(file_size="8Mi")) as jail:
        found = await attack(jail, code)
        assert found == {
            "write": "EFBIG", "truncate": "EFBIG", "fallocate": "EFBIG", "control": "ok",
        }  # fmt: skip
        assert Path(work, "big").stat().st_size == 4 * _MIB
        died = await jail.exec("head -c 20000000 /dev/zero > other")
        assert not died.ok
        assert Path(work, "other").stat().st_size <= 8 * _MIB


@pytest.mark.threat(101)
async def test_open_files_are_limited(jail: sb.Session) -> None:
    """Also the hard limit, which cannot be raised again."""
    code = """
    import resource
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as exc:
        out["error"] = errno.errorcode[exc.errno]
    for fd in held[-10:]:
        os.close(fd)
    out["count"] = len(held)
    out["raise"] = attempt(resource.setrlimit, resource.RLIMIT_NOFILE, (1 << 20, 1 << 20))
    """
    found = await attack(jail, code)
    assert found["error"] == "EMFILE"
    assert found["count"] <= DEFAULT_OPEN_FILES - 3
    assert found["raise"] == "ValueError"


@pytest.mark.threat(105)
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.spec("D6")
async def test_endless_output_leaves_the_host_flat(jail: sb.Session) -> None:
    """Collected under a cap, and in a pipe without a reader."""
    await jail.exec("yes | head -c 4000000", max_output_bytes=_MIB)  # warm
    before, begun = _rss(), time.monotonic()
    result = await jail.exec("yes", timeout_s=1, max_output_bytes=_MIB)
    assert (result.termination_reason, result.truncated) == ("timeout", True)
    assert len(result.stdout) <= _MIB
    assert time.monotonic() - begun < SOON_S
    assert _rss() - before < 24 * _MIB
    unread = await jail.run("yes", stdout=True, timeout_s=1)
    await asyncio.sleep(0.6)
    assert _rss() - before < 24 * _MIB, "a pipe without a reader blocks its writer"
    assert await unread.wait() in {137, 143}
    assert unread.termination_reason == "timeout"
    kept = UNREAD_STREAM_BYTES  # wait() buffers that much, so that a verbose command can end
    assert _rss() - before < kept + 24 * _MIB
    assert (await jail.exec("echo alive")).stdout == "alive\n"


@pytest.mark.threat(106)
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.spec("D6")
async def test_output_of_any_shape_arrives_whole(jail: sb.Session) -> None:
    """One line of 10 MB with NULs and bad UTF-8, and both pipes full at once."""
    code = """
    import threading
    line = b"\\xff\\x00" * 5_000_000
    other = threading.Thread(target=lambda: os.write(2, b"") or sys.stderr.buffer.write(line))
    other.start()
    sys.stdout.buffer.write(line)
    other.join()
    """
    source = program(code).replace("print(json.dumps(out), flush=True)", "")
    proc = await jail.run(source, script_type="python", stdout=True, stderr=True, timeout_s=20)
    stdout, stderr = await proc.communicate()
    assert stdout == stderr == b"\xff\x00" * 5_000_000
    assert proc.returncode == 0
