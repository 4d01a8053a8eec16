"""The places are what they claim to be and leave nothing. None of this uses the project."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import SOON_S
from tests.environments.places import (
    NAMES,
    PLAIN_UID,
    PODS,
    Place,
    main,
    missing,
    open_place,
    own_prefix,
)
from tests.environments.supervise import run_supervised

if TYPE_CHECKING:
    from collections.abc import Iterator

# Reports what the place allows. Raw system calls, because mount(8) refuses by itself when its user
# id is not 0, which would look like the kernel's refusal.
PROBE = r"""
import ctypes, json, os
libc = ctypes.CDLL(None, use_errno=True)
USER, MOUNT, PID = 0x10000000, 0x00020000, 0x20000000

def put(path, text):
    # Unbuffered: a buffered file would report the refusal only when it is collected.
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)

def nested(*, map_self, fstype):
    # The result is the first step that the kernel refused, or "done".
    read, write = os.pipe()
    if os.fork() == 0:
        uid, gid, answer = os.getuid(), os.getgid(), "done"
        try:
            if libc.unshare(USER | MOUNT | PID) != 0:
                answer = "unshare"
            if answer == "done" and map_self:
                try:
                    put("/proc/self/setgroups", "deny")
                    put("/proc/self/uid_map", f"0 {uid} 1")
                    put("/proc/self/gid_map", f"0 {gid} 1")
                except PermissionError:
                    answer = "map"
            if answer == "done" and map_self and os.getuid() != 0:
                answer = "map"
            if answer == "done" and fstype:
                child = os.fork()
                if child == 0:
                    kind = fstype.encode()
                    os._exit(1 if libc.mount(kind, b"/proc", kind, 0, None) else 0)
                if os.waitpid(child, 0)[1] != 0:
                    answer = "mount"
        finally:
            os.write(write, answer.encode())
            os._exit(0)
    os.close(write)
    os.wait()
    return os.read(read, 99).decode()

def refused(path):
    try:
        os.close(os.open(path, os.O_WRONLY))
    except OSError as error:
        return error.strerror
    return ""

status = dict(line.split(":", 1) for line in open("/proc/self/status"))
mounts = [line.split() for line in open("/proc/self/mountinfo")]
print(json.dumps({
    "uid": os.getuid(),
    "groups": os.getgroups(),
    "pid": os.getpid(),
    "effective": int(status["CapEff"], 16),
    "bounding": int(status["CapBnd"], 16),
    "no_new_privs": int(status["NoNewPrivs"]),
    "seccomp": int(status["Seccomp"]),
    "user_namespace": os.readlink("/proc/self/ns/user"),
    "net_namespace": os.readlink("/proc/self/ns/net"),
    "proc_sys": refused("/proc/sys/kernel/core_pattern"),
    "over_proc": sum(fields[4].startswith("/proc/") for fields in mounts),
    "cgroup_writable": [f[4] for f in mounts
                        if " - cgroup" in " ".join(f) and "rw" in f[5].split(",")],
    "unmapped": nested(map_self=False, fstype="tmpfs"),
    "mapped": nested(map_self=True, fstype="tmpfs"),
    "fresh_proc": nested(map_self=True, fstype="proc"),
    "fresh_proc_unmapped": nested(map_self=False, fstype="proc"),
    "environment": sorted(os.environ),
    "home_is_ours": os.stat(os.environ["HOME"]).st_uid == os.getuid(),
    "place": os.environ["SBX_PLACE"],
}))
"""
# Detaches itself as far as a process can, and stays.
LINGER = "setsid sh -c 'setsid sleep {seconds} & wait' & sleep 0.3; {then}"


def _mounts() -> list[str]:
    """The mounts of this machine, without those that other workers make for places of theirs."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if "/sbx-place-" not in line or own_prefix(os.getpid()) in line]


def _cgroups_of(pid: int) -> list[Path]:
    prefix = own_prefix(pid)
    # Groups of others come and go meanwhile, which os.walk passes over.
    return [
        Path(folder, name)
        for folder, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if name.startswith(prefix)
    ]


def _directories_of(pid: int) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"{own_prefix(pid)}*"))


def _sleepers(seconds: str) -> list[int]:
    wanted = f"sleep\0{seconds}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cmdline").read_bytes() == wanted:
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
    return found


def _until_gone(seconds: str, *, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while _sleepers(seconds):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _odd_seconds(index: int) -> str:
    """Return a duration that marks our own sleepers among those of the machine."""
    return f"300.{os.getpid()}{index}"


def _require(name: str) -> None:
    lacking = missing(name)
    if lacking is not None:
        pytest.skip(lacking)


@pytest.fixture(params=NAMES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Open each place in turn; compare the machine before and after."""
    _require(request.param)
    mounts = _mounts()
    with open_place(request.param) as opened:
        yield opened
    assert _mounts() == mounts
    assert _cgroups_of(os.getpid()) == []
    assert _directories_of(os.getpid()) == []


def _probe(place: Place) -> dict[str, Any]:
    done = place.run(["/usr/bin/python3", "-c", PROBE], timeout_s=30)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def test_each_place_is_as_described(place: Place) -> None:
    """Identity, capabilities and namespaces, with the machine itself as the counterpart."""
    facts = _probe(place)
    here = PODS.get(place.name)
    assert facts["place"] == place.name
    assert facts["uid"] == (here.uid if here else PLAIN_UID)
    assert facts["groups"] in ([], [facts["uid"]])
    assert facts["home_is_ours"]
    assert facts["seccomp"] == 0
    assert facts["no_new_privs"] == 0
    assert facts["user_namespace"] == str(Path("/proc/self/ns/user").readlink())
    assert "PYTEST_CURRENT_TEST" not in facts["environment"]
    assert (facts["effective"] != 0) == (place.name == "pod-default-caps")
    assert facts["proc_sys"] in ("Read-only file system", "Permission denied")
    if here:
        assert facts["pid"] == 1
        assert (facts["bounding"] == 0) == (not here.capabilities)
        assert facts["proc_sys"] == "Read-only file system" or here.uid != 0
        assert facts["over_proc"] > 3
        assert facts["cgroup_writable"] == []
        assert facts["net_namespace"] != str(Path("/proc/self/ns/net").readlink())


def test_nested_namespaces_work_and_a_fresh_proc_only_outside_of_pods(place: Place) -> None:
    """The plain user is the positive control of the masked /proc."""
    facts = _probe(place)
    assert facts["unmapped"] == "done"
    if place.name == "unprivileged":
        assert facts["mapped"] == facts["fresh_proc"] == "done"
        return
    assert facts["fresh_proc_unmapped"] == "mount"
    if place.name == "pod-root" and _kernel() >= (5, 12):
        # Since 5.12 a namespace may map its parent's uid 0 only if its maker had CAP_SETFCAP.
        assert facts["mapped"] == facts["fresh_proc"] == "map"
    else:
        assert facts["mapped"] == "done"
        assert facts["fresh_proc"] == "mount"


def _kernel() -> tuple[int, int]:
    major, minor = platform.release().split(".")[:2]
    return int(major), int("".join(filter(str.isdigit, minor)))


def test_output_and_exit_code_come_back(place: Place) -> None:
    """Both streams, apart, and the command's own code."""
    done = place.run(["sh", "-c", "echo out; echo err >&2; exit 7"], timeout_s=30)
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    assert done.left_behind == 0


def test_a_directory_is_readable_and_not_writable(place: Place) -> None:
    """What a place is given appears at its own path."""
    # Not `tmp_path`: pytest's directories are closed to other users.
    with tempfile.TemporaryDirectory(prefix="sbx-readable-") as name:
        given = Path(name)
        given.chmod(0o755)
        (given / "word").write_text("here")
        with open_place(place.name, readable=[given]) as opened:
            script = "cat word; touch mine 2>/dev/null && echo written"
            done = opened.run(["sh", "-c", script], cwd=given, timeout_s=30)
        assert done.stdout == "here"
        assert [path.name for path in given.iterdir()] == ["word"]


def test_time_limit_kills_what_has_detached_itself(place: Place) -> None:
    """Output so far is kept, and no process of the command lives on."""
    seconds = _odd_seconds(1)
    script = LINGER.format(seconds=seconds, then=f"echo started; sleep {seconds}")
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        place.run(["sh", "-c", script], timeout_s=4)
    assert time.monotonic() - began < SOON_S
    assert caught.value.output == "started\n"
    assert _sleepers(seconds) == []


def test_what_a_finished_command_left_is_counted_and_killed() -> None:
    """Only where there is no pid namespace: in a container the kernel ends them all."""
    _require("unprivileged")
    seconds = _odd_seconds(2)
    with open_place("unprivileged") as opened:
        script = LINGER.format(seconds=seconds, then="exit 0")
        done = opened.run(["sh", "-c", script], timeout_s=30)
    assert done.returncode == 0
    assert done.left_behind >= 1
    assert _sleepers(seconds) == []


@pytest.mark.parametrize("name", NAMES)
def test_killing_the_runner_ends_the_command(name: str) -> None:
    """SIGKILL gives the runner no chance to clean up; its supervisor does."""
    _require(name)
    seconds, mounts = _odd_seconds(3), _mounts()
    runner = subprocess.Popen(
        [sys.executable, "-m", "tests.environments.places", name, "--", "sleep", seconds],
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 20
        while not _sleepers(seconds):
            assert runner.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    assert _until_gone(seconds, limit_s=5)
    deadline = time.monotonic() + 5
    while _cgroups_of(runner.pid):
        assert time.monotonic() < deadline, _cgroups_of(runner.pid)
        time.sleep(0.05)
    assert _mounts() == mounts
    for directory in _directories_of(runner.pid):
        shutil.rmtree(directory)  # files are all that a killed runner may leave


def test_a_command_that_cannot_start_is_an_error_of_the_harness() -> None:
    """Not an exit code that a test could take for the command's."""
    with pytest.raises(RuntimeError, match="could not be started"):
        run_supervised(["/does/not/exist"], timeout_s=5, env={}, cwd=Path("/"))


def test_an_unknown_place_is_refused() -> None:
    """By a message that lists the known ones."""
    with (
        pytest.raises(ValueError, match="no place is called 'moon'; there are unprivileged, pod-"),
        open_place("moon"),
    ):
        pass


def test_a_closed_directory_is_refused_for_the_plain_user() -> None:
    """Better here than as a confusing failure inside."""
    _require("unprivileged")
    with (
        tempfile.TemporaryDirectory() as closed,
        pytest.raises(ValueError, match="is closed to them"),
        open_place("unprivileged", readable=[Path(closed)]),
    ):
        pass


def test_the_command_line_passes_the_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    """The debugging entry runs with the caller's streams."""
    _require("pod-user")
    assert main(["pod-user", "--", "sh", "-c", "id -u; exit 3"]) == 3
    assert capfd.readouterr().out == "1000\n"
    assert main(["pod-user", "--timeout", "1", "--", "sleep", "30"]) == 124
