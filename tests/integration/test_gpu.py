"""GPUs: stand-in nodes and a stand-in driver library, found below a root of the test's own."""

from __future__ import annotations

import functools
import os
import stat
import subprocess
from typing import TYPE_CHECKING

import pytest
from tests.conftest import session_of

from union import sandbox as sb
from union.sandbox._linux import gpu

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.spec("J"),
    pytest.mark.skipif(
        os.geteuid() != 0, reason="making device nodes needs root: run the tests as root"
    ),
]
FIND = functools.partial(gpu.find, for_everybody=True, environ={})


def node(root: Path, name: str, mode: int = 0o666) -> None:
    """A node that behaves like /dev/null."""
    (root / "dev").mkdir(exist_ok=True)
    path = root / "dev" / name
    os.mknod(path, mode | stat.S_IFCHR, os.makedev(1, 3))
    path.chmod(mode)


def library(root: Path, place: str, version: str = "550.1") -> None:
    """Build a library with the name of the driver's, whose function returns 42."""
    target = root / place.lstrip("/")
    target.mkdir(parents=True, exist_ok=True)
    output = str(target / f"libcuda.so.{version}")
    subprocess.run(
        ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", output],
        input="int cuDriverGetVersion(void) { return 42; }",
        text=True,
        check=True,
    )
    (target / "libcuda.so.1").symlink_to(f"libcuda.so.{version}")
    (target / "libother.so.1").write_text("not the driver's")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with two devices and a driver outside the system directories."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        node(tmp_path, name)
    library(tmp_path, "/opt/nvidia/lib64")
    return tmp_path


def test_devices_are_found_by_number(root: Path) -> None:
    node(root, "nvidia10")
    node(root, "nvidia2")
    (root / "dev" / "nvidia3").write_text("no device")
    names = [os.path.basename(path) for path in gpu.devices(root=str(root))]
    assert names == ["nvidia0", "nvidia1", "nvidia2", "nvidia10"]


def test_the_requested_number_of_devices_and_the_control_nodes_are_visible(root: Path) -> None:
    found = FIND(1, root=str(root))
    assert [n.path for n in found.nodes] == ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"]
    assert {n.source for n in found.nodes} == {f"{root}{n.path}" for n in found.nodes}
    assert len(FIND(2, root=str(root)).nodes) == 4


def test_libraries_outside_the_system_are_mounted_file_by_file(root: Path) -> None:
    found = FIND(1, root=str(root))
    assert [item.path for item in found.libraries] == [
        "/opt/nvidia/lib64/libcuda.so.1",
        "/opt/nvidia/lib64/libcuda.so.550.1",
    ]
    assert {item.source for item in found.libraries} == {
        f"{root}/opt/nvidia/lib64/libcuda.so.550.1"
    }
    assert found.library_path == ("/opt/nvidia/lib64",)


@pytest.mark.parametrize("cached", [False, True])
def test_libraries_of_the_system_need_no_mount(tmp_path: Path, *, cached: bool) -> None:
    """LD_LIBRARY_PATH is set only if the loader's cache lacks them."""
    node(tmp_path, "nvidia0")
    library(tmp_path, "/usr/local/nvidia/lib64", version="999.9")
    if cached:
        (tmp_path / "etc").mkdir()
        (tmp_path / "etc" / "ld.so.conf").write_text("/usr/local/nvidia/lib64\n")
        subprocess.run(["/sbin/ldconfig", "-r", str(tmp_path)], check=True, capture_output=True)
    found = FIND(1, root=str(tmp_path))
    assert found.libraries == ()
    assert found.library_path == (() if cached else ("/usr/local/nvidia/lib64",))


def test_the_loader_s_choice_comes_before_a_well_known_directory(root: Path) -> None:
    library(root, "/srv/driver")
    (root / "etc").mkdir()
    (root / "etc" / "ld.so.conf").write_text("/srv/driver\n")
    subprocess.run(["/sbin/ldconfig", "-r", str(root)], check=True, capture_output=True)
    found = FIND(1, root=str(root))
    assert found.libraries[0].path == "/srv/driver/libcuda.so.1"
    assert found.library_path == ()


def test_a_directory_may_be_named_in_the_environment(tmp_path: Path) -> None:
    node(tmp_path, "nvidia0")
    library(tmp_path, "/home/someone/driver")
    named = {"LD_LIBRARY_PATH": "relative::/home/someone/driver"}
    found = FIND(1, root=str(tmp_path), environ=named)
    assert found.library_path == ("/home/someone/driver",)


@pytest.mark.parametrize("damage", [b"", b"glibc-ld.so.cache1.1", b"glibc-ld.so.cache1.1" * 20])
def test_a_damaged_cache_is_no_cache(root: Path, damage: bytes) -> None:
    (root / "etc").mkdir()
    (root / "etc" / "ld.so.cache").write_bytes(damage)
    assert FIND(1, root=str(root)).library_path == ("/opt/nvidia/lib64",)


def refused(count: int, root: Path, **options: object) -> sb.BackendUnavailableError:
    with pytest.raises(sb.BackendUnavailableError) as caught:
        FIND(count, root=str(root), **options)
    assert caught.value.backend == "bubblewrap"
    assert caught.value.hint
    return caught.value


def test_a_missing_device_is_reported(tmp_path: Path) -> None:
    error = refused(1, tmp_path)
    assert "no NVIDIA device (/dev/nvidia0)" in str(error)
    assert "--gpus all" in error.hint


def test_too_few_devices_are_reported(root: Path) -> None:
    assert "more NVIDIA devices than there are (/dev/nvidia0, /dev/nvidia1)" in str(
        refused(3, root)
    )


def test_a_driver_without_libraries_is_reported(tmp_path: Path) -> None:
    node(tmp_path, "nvidia0")
    error = refused(1, tmp_path)
    assert "libcuda.so.1 was not found" in str(error)
    assert error.missing == ("libcuda.so.1",)


def test_a_device_that_the_sandbox_may_not_open_is_reported(root: Path) -> None:
    (root / "dev" / "nvidia0").chmod(0o660)
    error = refused(1, root)
    assert "closed to the sandbox" in str(error)
    assert "0660" in str(error)
    assert FIND(1, root=str(root), for_everybody=False), "who owns it may"


_LOOK = """
import ctypes, os, stat
print(sorted(n for n in os.listdir("/dev") if n.startswith("nvidia")))
with open("/dev/nvidia0", "r+b", buffering=0) as device:
    print(device.write(b"x"), stat.S_ISCHR(os.fstat(device.fileno()).st_mode))
print(ctypes.CDLL("libcuda.so.1").cuDriverGetVersion())
print(sorted(os.listdir("/opt/nvidia/lib64")))
"""


async def test_a_sandbox_has_the_device_and_the_library(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "find", functools.partial(gpu.find, root=str(root)))
    async with session_of("bubblewrap", resources=sb.Resources(gpu=1)) as sbx:
        assert dict(sbx.isolation.limits)["gpu"] == "nodes"
        for _ in range(2):  # a fresh Python, and one that waited
            assert (await sbx.run_code(_LOOK)).splitlines() == [
                "['nvidia-uvm', 'nvidia0', 'nvidiactl']",
                "1 True",
                "42",
                "['libcuda.so.1', 'libcuda.so.550.1']",
            ]
        removal = await sbx.exec("rm /dev/nvidia0; mknod /tmp/n c 1 3; chmod 777 /dev/nvidia0")
        assert removal.returncode != 0
        assert stat.S_IMODE((root / "dev" / "nvidia0").stat().st_mode) == 0o666


async def test_without_a_request_no_device_is_visible(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the same host."""
    monkeypatch.setattr(gpu, "find", functools.partial(gpu.find, root=str(root)))
    async with session_of("bubblewrap") as sbx:
        assert (await sbx.exec("ls /dev | grep -c nvidia")).stdout == "0\n"
        assert "gpu" not in dict(sbx.isolation.limits)


@pytest.mark.skipif(
    bool(gpu.devices()),
    reason="this machine has a GPU; the error without one is tested on other machines",
)
async def test_opening_without_a_device_fails_at_once() -> None:
    with pytest.raises(sb.BackendUnavailableError, match="no NVIDIA device"):
        await session_of("bubblewrap", resources=sb.Resources(gpu=1)).open()


@pytest.mark.parametrize("backend", ["userns", "none", "sandbox-exec"])
def test_another_backend_refuses_before_anything_starts(backend: str) -> None:
    with pytest.raises(sb.errors.SandboxUsageError, match="does not support GPUs") as caught:
        session_of(backend, resources=sb.Resources(gpu=1))
    assert backend in str(caught.value)
