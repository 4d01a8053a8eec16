"""Attacks on the ids of root's sandboxes: nothing that happens after open() may weaken them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import OpenSession, sandbox_processes
from tests.escape.inside import attack

from union import sandbox as sb
from union.sandbox._linux import host, kernel
from union.sandbox.on_device import _probe

if TYPE_CHECKING:
    from union.sandbox._plan.rootfs import Shown

pytestmark = [
    pytest.mark.spec("G1", "G2"),
    pytest.mark.needs_root,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root has ids to lose: run as root"),
]


@pytest.fixture
def has_ids() -> None:
    if not kernel.can_map_mounts():
        pytest.skip("root may not map ids here: grant SYS_ADMIN to the container")


@pytest.fixture
def replaced(work: str, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A file of the work dir that is replaced between its check and its mount, if armed.

    That is what sandboxed code does in a loop until it hits the moment.
    """
    armed = [False]
    original = host.pinned
    settings = Path(work, "cfg", "settings")
    settings.parent.mkdir()
    settings.write_text("old")

    def pinned(named: str, *args: Any, **options: Any) -> tuple[Shown, os.stat_result]:
        found = original(named, *args, **options)
        if armed[0] and named == str(settings):
            fresh = settings.with_name("new")
            fresh.write_text("new")
            fresh.rename(settings)
        return found

    monkeypatch.setattr(host, "pinned", pinned)
    return armed


def _owners() -> set[int]:
    found = set()
    for pid in sandbox_processes():
        try:
            found.add(os.stat(f"/proc/{pid}").st_uid)
        except FileNotFoundError:
            continue
    return found


@pytest.mark.threat(141)
async def test_a_file_replaced_while_mounted_weakens_no_id(
    jailed: OpenSession, work: str, replaced: list[bool]
) -> None:
    """Within a session: its mounts are made again after the caller has replaced the file."""
    shown = f"{work}/cfg/settings"
    async with jailed(host_work_dir=work, read_only_paths=[shown]) as session:
        if session.isolation.ids != "unprivileged":
            pytest.skip("root may not map ids here: grant SYS_ADMIN to the container")
        by_caller = Path(work, "cfg", "saved")
        by_caller.write_text("saved")
        by_caller.rename(shown)
        replaced[0] = True
        with pytest.raises(sb.SandboxError, match="was replaced") as caught:
            await session.exec("id -u", network_mode="open")
        assert caught.value.hint
        replaced[0] = False
        assert session.isolation.ids == "unprivileged"
        proc = await session.run(["sleep", "60"], background=True, network_mode="open")
        assert _owners() - {0}, "the command runs"
        status = await attack(session, "out['uid'] = os.getuid()", network_mode="open")
        assert status == {"uid": 1000}
        assert proc.isolation.ids == "unprivileged"
        proc.kill()
        await proc.wait()


@pytest.mark.threat(141)
async def test_a_file_replaced_at_open_weakens_no_id(
    jailed: OpenSession, work: str, replaced: list[bool], has_ids: None
) -> None:
    shown = f"{work}/cfg/settings"
    replaced[0] = True
    session = jailed(host_work_dir=work, read_only_paths=[shown])
    with pytest.raises(sb.SandboxError, match="was replaced"):
        await session.open()
    replaced[0] = False
    async with jailed(host_work_dir=work, read_only_paths=[shown]) as session:
        assert session.isolation.ids == "unprivileged", "without the attack it opens"


@pytest.mark.threat(141)
async def test_a_link_to_another_file_system_weakens_no_id(
    jailed: OpenSession,
    work: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_ids: None,
) -> None:
    """Outside the work dir: the link leads to where there are no id-mapped mounts."""
    shown = tmp_path / "shown"
    shown.write_text("old")
    original = host.pinned

    def pinned(named: str, *args: Any, **options: Any) -> tuple[Shown, os.stat_result]:
        found = original(named, *args, **options)
        if named != str(shown):
            return found
        shown.unlink()
        shown.symlink_to("/proc/version")
        return found

    monkeypatch.setattr(host, "pinned", pinned)
    with pytest.raises(sb.BackendUnavailableError, match="was replaced"):
        await jailed(host_work_dir=work, read_only_paths=[str(shown)]).open()
    monkeypatch.setattr(host, "pinned", original)
    async with jailed(host_work_dir=work, read_only_paths=["/proc/version"]) as session:
        assert session.isolation.ids == "caller", "named by the caller it is a reason, and reported"


@pytest.mark.threat(141)
async def test_strict_refuses_roots_own_id(
    jailed: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("can_map_mounts", "can_give_away"):
        monkeypatch.setattr(kernel, name, lambda: False)
    async with jailed() as session:
        assert session.isolation.ids == "caller", "reported where it is not strict"
        if session.isolation.proc != "fresh" or session.isolation.root != "pivot":
            pytest.skip("strict=True opens no session in this container: unmask its /proc")
    with pytest.raises(sb.BackendUnavailableError, match="id of its own") as caught:
        await jailed(strict=True).open()
    assert "strict=True" in caught.value.hint


@pytest.mark.threat(141)
async def test_a_sandbox_with_another_id_than_planned_is_detected(
    jailed: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is compared with the process, not with the plan."""
    async with jailed() as session:
        plan = session.isolation
    monkeypatch.setattr(_probe, "verified", set())
    original = _probe._verify

    def verify(pid: int, isolation: sb.Isolation, owner: int | None, *, no_new_privs: bool) -> None:
        original(pid, isolation, owner, no_new_privs=no_new_privs)
        original(os.getpid(), isolation, owner, no_new_privs=no_new_privs)

    monkeypatch.setattr(_probe, "_verify", verify)
    assert plan.ids == "unprivileged"
    with pytest.raises(sb.BackendUnavailableError, match="ids: unprivileged"):
        await jailed().open()


@pytest.mark.threat(69, 71, 141)
async def test_roots_own_id_reads_nothing_of_proc_that_is_roots(
    jailed: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no other id is available, files of /proc that only root may read are empty."""
    code = """
    for name in os.listdir("/proc"):
        path = "/proc/" + name
        if name.isdigit() or os.path.islink(path) or os.path.isdir(path):
            continue
        found = os.stat(path)
        fd = -1
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            size = len(os.read(fd, 64))
        except OSError:
            size = 0
        out[name] = [stat.S_IMODE(found.st_mode), size]
        fd >= 0 and os.close(fd)
    """
    private = [
        name
        for name in os.listdir("/proc")
        if not name.isdigit()
        and os.path.isfile(f"/proc/{name}")
        and not os.stat(f"/proc/{name}").st_mode & 0o004
    ]
    assert "slabinfo" in private or "timer_list" in private, "this host has some"
    for name in ("can_map_mounts", "can_give_away"):
        monkeypatch.setattr(kernel, name, lambda: False)
    async with jailed() as session:
        assert session.isolation.ids == "caller"
        found = await attack(session, code)
    assert found["meminfo"][1] > 0
    read = {name for name in private if found[name][1]}
    assert not read, read
    assert found["keys"][1] == found["key-users"][1] == 0
