"""Control groups are used only where the kernel enforces their limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from union.sandbox._linux import cgroup

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.spec("B9", "G3")

V1 = ("memory.limit_in_bytes", "memory.oom_control", "cgroup.procs")
V2 = ("memory.max", "memory.events", "cgroup.procs")


class Kernel:
    """A cgroup file system: a new directory has the files of its controller."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...]) -> None:
        from pathlib import Path

        plain_mkdir, plain_rmdir = Path.mkdir, Path.rmdir

        def mkdir(path: Path) -> None:
            plain_mkdir(path)
            for name in files:
                (path / name).touch()

        def rmdir(path: Path) -> None:
            for name in files:
                (path / name).unlink()
            plain_rmdir(path)

        monkeypatch.setattr(Path, "mkdir", mkdir)
        monkeypatch.setattr(Path, "rmdir", rmdir)


@pytest.mark.parametrize("report", [True, False])
def test_version_1_without_a_report_of_kills_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, report: bool
) -> None:
    """As in gVisor, whose memory controller accepts a limit and ignores it."""
    files = V1 if report else tuple(name for name in V1 if name != "memory.oom_control")
    Kernel(monkeypatch, files)
    mounts = (("cgroup", "/", str(tmp_path), "rw,memory"),)
    found = cgroup._find_v1(mounts, {"memory": "/"})
    assert found == (cgroup.Hierarchy(1, (("memory", str(tmp_path)),)) if report else None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("report", [True, False])
def test_version_2_without_a_report_of_kills_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, report: bool
) -> None:
    control = tmp_path / "cgroup.subtree_control"
    control.write_text("memory pids\n")
    files = V2 if report else tuple(name for name in V2 if name != "memory.events")
    Kernel(monkeypatch, files)
    mounts = (("cgroup2", "/", str(tmp_path), "rw"),)
    found = cgroup._find_v2(mounts, {"": "/"})
    places = (("memory", str(tmp_path)), ("pids", str(tmp_path)))
    assert found == (cgroup.Hierarchy(2, places) if report else None)
    assert list(tmp_path.iterdir()) == [control]
