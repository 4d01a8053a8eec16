"""Attacks on the event loop: the host's work before a run must not grow with leftovers.

All sessions of a process share its event loop, so one that blocks it delays all of them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from tests.escape.inside import program

from union.sandbox._linux.tree import WorkTree
from union.sandbox.on_device._venv import Venv

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import OpenSession

    from union import sandbox as sb

_START_UP_FILES = """
import glob
site = glob.glob(".sandbox-venv/lib/python3*/site-packages")[0]
for n in range(given["files"]):
    os.close(os.open(f"{site}/x{n}.pth", os.O_CREAT | os.O_WRONLY))
"""
_CROWDS = {
    "in the place of the interpreter": """
os.unlink(".sandbox-venv/bin/python")
os.mkdir(".sandbox-venv/bin/python")
for n in range(500):
    os.close(os.open(f".sandbox-venv/bin/python/{n}", os.O_CREAT | os.O_WRONLY))
""",
    "in the place of the settings": """
os.unlink(".sandbox-venv/pyvenv.cfg")
os.makedirs(".sandbox-venv/pyvenv.cfg" + "/d" * 300)
""",
    "in the place of everything": """
os.rename(".sandbox-venv", "old")
os.makedirs(".sandbox-venv" + "/d" * 300)
""",
}


async def _plant(jail: sb.Session, code: str, **given: object) -> None:
    # Not by a Python of the venv, whose start reads these files.
    await jail.put_bytes("plant.py", program(code, given=given).encode())
    done = await jail.exec('"$(readlink -f "$(command -v python)")" -I plant.py')
    assert done.returncode == 0, done.stderr


@pytest.mark.threat(16, 49)
async def test_thousands_of_start_up_files_are_not_read_before_each_run(
    jailed: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few are read, because a waiting Python must not miss one; thousands are not."""
    looked: list[int] = []

    def counting(original: Callable[..., object]) -> Callable[..., object]:
        def counted(self: WorkTree, names: tuple[str, ...]) -> object:
            looked.append(len(names))
            return original(self, names)

        return counted

    for name in ("fingerprint", "hold"):
        monkeypatch.setattr(WorkTree, name, counting(getattr(WorkTree, name)))
    for files, seen in ((60, True), (4_200, False)):
        async with jailed() as jail:
            await jail.run_code("pass")
            await _plant(jail, _START_UP_FILES, files=files)
            looked.clear()
            for _ in range(2):
                assert await jail.run_code("print('works')") == "works\n"
            assert (max(looked) >= files) is seen, looked
            assert max(looked) < 100, looked


@pytest.mark.threat(16, 49)
@pytest.mark.parametrize("where", _CROWDS)
async def test_a_venv_of_any_size_is_repaired_outside_the_event_loop(
    jailed: OpenSession, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Removing a large tree takes long; other sessions are served meanwhile."""
    repaired: list[bool] = []
    original = Venv._repair

    def watched(self: Venv) -> None:
        repaired.append(threading.current_thread() is threading.main_thread())
        original(self)

    monkeypatch.setattr(Venv, "_repair", watched)
    async with jailed() as jail:
        await jail.run_code("pass")
        assert repaired == [True], "it is made at once where nothing has run"
        await _plant(jail, _CROWDS[where])
        assert await jail.run_code("print('mended')") == "mended\n"
        assert (await jail.exec("echo works")).stdout == "works\n"
        assert len(repaired) >= 2
        assert not any(repaired[1:])


@pytest.mark.threat(16, 46, 49)
async def test_a_venv_of_an_earlier_session_is_repaired_outside_the_event_loop(
    jailed: OpenSession, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    """A session opens in a work dir that other sessions have used."""
    async with jailed(host_work_dir=work) as jail:
        await jail.run_code("pass")
        await _plant(jail, _CROWDS["in the place of everything"])
    threads: list[bool] = []
    original = Venv._repair

    def watched(self: Venv) -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        original(self)

    monkeypatch.setattr(Venv, "_repair", watched)
    async with jailed(host_work_dir=work) as jail:
        assert await jail.run_code("print('mended')") == "mended\n"
    assert threads == [False]
