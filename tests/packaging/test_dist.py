"""The files of `make dist` are complete and install without a compiler."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from scripts import dist
from scripts.dist_checks import (
    LAUNCHER,
    MAC_LAUNCHER,
    MAC_MACHINES,
    MACHINES,
    DistError,
    check_sdist,
    check_wheel,
    elf_machine,
    mach_o_machine,
)
from tests.cluster.wheels import code_of, contents, made_by_a_caller

from union.sandbox.cluster._wheel import find_source, write_wheel

pytestmark = pytest.mark.slow

SRC = dist.ROOT / "src"
HERE = platform.machine()


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dist.build(dist.ROOT, tmp_path_factory.mktemp("sdist"), "--sdist")


@pytest.fixture(scope="module")
def native(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from source with the local compiler."""
    return dist.build(sdist, tmp_path_factory.mktemp("native"), "--wheel")


def small_elf(machine: int, *segments: int) -> bytes:
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, len(segments)
    )
    return head.ljust(64, b"\0") + b"".join(struct.pack("<I52x", kind) for kind in segments)


def test_an_elf_header_is_read():
    assert elf_machine(small_elf(183, 1, 1)) == MACHINES["aarch64"]
    with pytest.raises(DistError, match="not static"):
        elf_machine(small_elf(62, 1, 3))
    with pytest.raises(DistError, match="no 64-bit"):
        elf_machine(b"#!/bin/sh\n")


@pytest.mark.spec("A1")
def test_the_source_distribution_is_whole(sdist: Path):
    check_sdist(sdist)


@pytest.mark.spec("A1")
def test_the_wheel_of_this_machine_is_whole(native: Path):
    check_wheel(native, architecture=HERE, source=SRC)


def rewritten(wheel: Path, target: Path, change) -> Path:
    target.mkdir()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target / wheel.name, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            if change(info) is not None:
                new.writestr(info, content)
    return target / wheel.name


def test_a_wheel_that_lost_something_is_refused(native: Path, tmp_path: Path):
    def not_executable(info: zipfile.ZipInfo) -> zipfile.ZipInfo:
        if info.filename == LAUNCHER:
            info.external_attr = 0o644 << 16
        return info

    broken = rewritten(native, tmp_path / "a", not_executable)
    with pytest.raises(DistError, match="not executable"):
        check_wheel(broken, architecture=HERE, source=SRC)
    other = next(name for name in MACHINES if name != HERE)
    with pytest.raises(DistError, match=f"not a wheel for {other}"):
        check_wheel(native, architecture=other, source=SRC)
    broken = rewritten(native, tmp_path / "b", lambda i: None if "py.typed" in i.filename else i)
    with pytest.raises(DistError, match="RECORD"):
        check_wheel(broken, architecture=HERE, source=SRC)


def test_the_pure_wheel_has_no_launcher_and_says_so(sdist: Path, tmp_path: Path):
    wheel = dist.build_wheel(sdist, tmp_path, dist.PURE)
    check_wheel(wheel, architecture=dist.PURE, source=SRC)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    program = (
        "import asyncio\nfrom union import sandbox as sb\n"
        "try:\n    asyncio.run(sb.on_device.session(backend='userns').open())\n"
        "except sb.BackendUnavailableError as exc:\n    print(exc.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        check=False,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path / "installed")},
    )
    assert (done.stdout, done.stderr) == ("backend-unavailable\n", "")


@pytest.mark.timeout(240)
def test_the_wheel_for_macos(sdist: Path, tmp_path: Path):
    """One of the two; `make dist` builds both. It cannot be executed here."""
    pytest.importorskip("ziglang", reason="pip install --group dist (make dist does)")
    wheel = dist.build_wheel(sdist, tmp_path, "macos-arm64")
    check_wheel(wheel, architecture="macos-arm64", source=SRC)
    assert wheel.name.endswith("-py3-none-macosx_13_0_arm64.whl")
    with zipfile.ZipFile(wheel) as archive:
        program = archive.read(MAC_LAUNCHER)
    assert mach_o_machine(program) == MAC_MACHINES["macos-arm64"]
    for wrong in (program.replace(b"libSystem.B", b"libSysten.B"), b"\x7fELF" + program[4:], b""):
        with pytest.raises(DistError):
            mach_o_machine(wrong)
    with pytest.raises(DistError, match="macos-x86_64"):
        check_wheel(wheel, architecture="macos-x86_64", source=SRC)


@pytest.mark.spec("P5")
def test_an_image_gets_the_files_of_an_installed_wheel(native: Path, tmp_path: Path):
    site = tmp_path / "site"
    with zipfile.ZipFile(native) as archive:
        archive.extractall(site)
        recorded = {
            name: archive.read(name)
            for name in archive.namelist()
            if name.startswith("union/sandbox/")
        }
    kind, _, wheel = made_by_a_caller(tmp_path / "wheel", path=site)
    assert kind == "installed"
    assert code_of(wheel) == recorded
    # But for the launcher, which was compiled a second time, this is what a checkout gives.
    here = write_wheel(find_source(), tmp_path)
    assert set(code_of(here.path)) == set(recorded)
    about = "unionai_sandbox-{}.dist-info/METADATA"
    version = wheel.name.split("-")[1]
    ours = contents(here.path)[about.format(here.version)].decode()
    theirs = contents(wheel)[about.format(version)].decode()
    assert theirs.replace(version, here.version) == ours


def test_it_installs_and_runs_where_there_is_no_compiler(native: Path):
    print(f"{dist.try_out(native):.1f} s")


# `make dist` builds and checks all of them. Here one: the first use of the compiler builds its libc
# for an architecture, half a minute of processor time.
@pytest.mark.timeout(600)  # the first time, zig compiles the C library of the other architecture
@pytest.mark.parametrize("architecture", [name for name in dist.ARCHITECTURES if name != HERE])
def test_the_wheel_for_publishing(sdist: Path, tmp_path: Path, architecture: str):
    pytest.importorskip("ziglang", reason="pip install --group dist (make dist does)")
    before = dist.LAUNCHER.read_bytes() if dist.LAUNCHER.exists() else b""
    wheel = dist.build_wheel(sdist, tmp_path, architecture)
    check_wheel(wheel, architecture=architecture, source=SRC)
    if before:
        assert dist.LAUNCHER.read_bytes() == before, "this machine's own must stay"
    with zipfile.ZipFile(wheel) as archive:
        launcher = Path(archive.extract(LAUNCHER, tmp_path))
    launcher.chmod(0o755)
    command = [str(launcher)]
    if architecture != HERE:
        emulator = shutil.which(f"qemu-{architecture}-static")
        if emulator is None:
            return  # Only its header is checked; executing it needs qemu-user-static.
        command.insert(0, emulator)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reading, writing = os.pipe()
    # It waits for requests, and ends when no client is connected.
    with subprocess.Popen(command, stdin=theirs, stdout=reading) as process:
        theirs.close()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        ours.close()
        assert process.wait(20) == 0
    os.close(reading)
    os.close(writing)
