"""Attacks on automatic choices: another program, another process, a weaker backend."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import OpenSession, eventually
from tests.escape.plants import drive, marked

from union import sandbox as sb

if TYPE_CHECKING:
    from tests.escape.plants import Victim

_BARE = """#!/bin/sh
# A fake bwrap: it claims to support every option, and runs its command without isolation.
: > {marker}
case "$1" in --version) echo "bubblewrap 9.9.9"; exit;; --help) exec {real} --help;; esac
while [ "$#" -gt 0 ]; do
    case "$1" in --) shift; exec "$@";; *) shift;; esac
done
"""


@pytest.mark.threat(44, 47, 114)
def test_a_bwrap_in_the_work_dir_is_not_found(plant: Path, work: str) -> None:
    """By a relative entry of PATH, while the owner's current directory is the work dir."""
    marker = plant / "ran-outside"
    fake = Path(work, "bwrap")
    fake.write_text(_BARE.format(marker=marker, real="bwrap"))
    fake.chmod(0o755)
    body = """
    async with session(host_work_dir=os.getcwd()) as sbx:
        print((await sbx.exec("echo fine")).stdout.strip())
    """
    for path in (".:", ":", "./:"):
        output = drive("bubblewrap", body, cwd=work, env={"PATH": path + os.environ["PATH"]})
        assert output == "fine\n"
    assert not marker.exists()
    output = drive("bubblewrap", body.replace("os.getcwd()", repr(work)), cwd="/")
    assert output == "fine\n"


@pytest.mark.threat(114)
def test_a_bwrap_that_isolates_nothing_is_detected(plant: Path, tmp_path: Path) -> None:
    """First on PATH, with the right options and no effect: no session opens, nothing runs bare."""
    real = shutil.which("bwrap")
    assert real is not None
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "bwrap"
    fake.write_text(_BARE.format(marker=tmp_path / "asked", real=real))
    fake.chmod(0o755)
    # Programs below /tmp are not trusted; the test makes an exception for the plant.
    body = """
    from union.sandbox._linux import host_programs
    host_programs._require_safe = host_programs._accept
    try:
        async with session() as sbx:
            output = await sbx.exec(["cat", sys.argv[1]])
            print("opened", output.stdout)
    except sb.SandboxError as exc:
        print("refused", type(exc).__name__)
    """
    path = f"{fake.parent}:{os.environ['PATH']}"
    output = drive("bubblewrap", body, args=[str(plant / "secret")], env={"PATH": path})
    assert output == "refused BackendUnavailableError\n"
    assert (tmp_path / "asked").exists(), "the plant was executed"
    output = drive("bubblewrap", body, args=["/etc/no-such-file"])
    assert output.startswith("opened")


@pytest.mark.threat(114)
@pytest.mark.parametrize(
    "backend", ["", "None", "NONE", "bwrap", "user-ns", "userns ", "off", "docker", None, 0, False]
)
async def test_an_unknown_backend_is_refused(backend: object) -> None:
    with pytest.raises((sb.SandboxUsageError, TypeError)):
        await sb.on_device.session(backend=backend).open()  # type: ignore[arg-type]


@pytest.mark.threat(53)
async def test_a_handle_of_an_ended_run_signals_no_process(
    jailed: OpenSession, victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pid has been reused by a process of the host."""
    async with jailed() as jail:
        proc = await jail.run("true")
        assert proc.returncode == 0
        for name in ("pid", "_pid"):
            monkeypatch.setattr(type(proc), name, victim.pid, raising=False)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            try:
                proc.send_signal(number)
            except (ProcessLookupError, sb.SandboxError):
                continue
        proc.kill()
        proc.terminate()
        await asyncio.sleep(0.1)
        assert victim.report()["signals"] == []
    assert victim.report()["signals"] == []
    assert victim.receives(signal.SIGUSR1), "the control"


@pytest.mark.threat(53)
async def test_reused_pids_inside_are_not_confused(jailed: OpenSession) -> None:
    """Every run has the same pid inside; ending one does not affect the others."""
    async with jailed() as jail:
        mark = f"sbx-number-{os.getpid()}"
        loop = ["sh", "-c", "while :; do sleep 0.1; done"]
        ended = await jail.run("true")
        runs = [await jail.run([*loop, f"{mark}-{n}"], background=True) for n in range(3)]
        assert len({run.pid for run in (ended, *runs)}) == 1, "all pids are equal"
        ended.kill()
        runs[1].kill()
        assert await runs[1].wait() == 137
        ended.terminate()
        await asyncio.sleep(0.2)
        assert eventually(lambda: not marked(f"{mark}-1"))
        assert marked(f"{mark}-0")
        assert marked(f"{mark}-2")
        assert [runs[n].returncode for n in (0, 2)] == [None, None]
