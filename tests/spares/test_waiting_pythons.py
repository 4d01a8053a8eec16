"""A waiting Python is indistinguishable from a fresh one, and never used when it would not be."""

from __future__ import annotations

import asyncio
import os
import zipfile
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from tests.conftest import session_of
from tests.spares.programs import PROGRAMS

from union import sandbox as sb
from union.sandbox.on_device._pythons import WaitingPythons

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Records, for each Python run from now on, whether a waiting one was used."""
    record: list[bool] = []
    original = WaitingPythons.take

    def take(self: WaitingPythons, *args: object, **options: object) -> object:
        found = original(self, *args, **options)  # type: ignore[arg-type]  # passed through
        record.append(found is not None)
        return found

    monkeypatch.setattr(WaitingPythons, "take", take)
    return record


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The same, from the beginning of a test."""
    return recorded(monkeypatch)


async def one_waits(sbx: sb.Session) -> None:
    """Returns when a Python waits: it is started a moment after the last script has begun."""
    pythons = sbx._transport.pool.pythons  # type: ignore[union-attr]  # a session on this machine
    async with asyncio.timeout(25):
        while not any(pythons._waiting.values()):
            await asyncio.sleep(0.002)


async def one_is_forked(sbx: sb.Session) -> None:
    """Returns when a fork of the session's template waits."""
    pool = sbx._transport.pool  # type: ignore[union-attr]  # a session on this machine
    async with asyncio.timeout(40):
        while not pool.template.is_ready:
            await sbx.run_code("pass")
        pool.pythons.release()
        await sbx.run_code("pass")
        await one_waits(sbx)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("work")
    (directory / "helper_module.py").write_text("VALUE = 'helped'\n")
    (directory / "statistics_shadow.py").write_text("")
    return directory


CASES = [
    *((name, "forked") for name in PROGRAMS),
    # Those of other backends are started; the contract runs there too.
    *((name, "started") for name in sorted(PROGRAMS)[::6]),
]


Pair = tuple[sb.Session, sb.Session]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pairs(work: Path) -> AsyncIterator[Callable[[str], Awaitable[Pair]]]:
    """Two sessions in one work dir, for each kind of waiting Python: one keeps it, one does not."""
    options = {"host_work_dir": str(work)}
    made: dict[str, Pair] = {}
    async with AsyncExitStack() as stack:

        async def pair(kind: str) -> Pair:
            if kind not in made:
                preload = None if kind == "started" else ()
                warm = session_of("userns", preload=preload, **options)
                cold = session_of("userns", warm=0, **options)
                made[kind] = (
                    await stack.enter_async_context(warm),
                    await stack.enter_async_context(cold),
                )
                if kind == "forked":
                    await one_is_forked(warm)
            # One that began before the last program had ended may be outdated.
            await made[kind][0].run_code("pass")
            await one_waits(made[kind][0])
            return made[kind]

        yield pair


def test_there_are_many_programs() -> None:
    assert len(PROGRAMS) >= 60


@pytest.mark.spec("C4", "N1")
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name, kind", CASES)
async def test_the_same_from_a_waiting_python_and_from_a_fresh_one(
    name: str,
    kind: str,
    pairs: Callable[[str], Awaitable[Pair]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warm, cold = await pairs(kind)
    taken = recorded(monkeypatch)
    results = []
    for session in (warm, cold):
        done = await session.exec(PROGRAMS[name], script_type="python", timeout_s=20)
        results.append((done.stdout, done.stderr, done.returncode, done.termination_reason))
    assert results[0] == results[1]
    assert taken == [True, False], "one of the two did not go the way it was meant to"


@pytest.mark.spec("B5")
async def test_what_an_earlier_run_installed_is_there(taken: list[bool], tmp_path: Path) -> None:
    wheel = tmp_path / "late-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("late.py", "VALUE = 'late'\n")
        archive.writestr(
            "late-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: late\nVersion: 1.0\n"
        )
        archive.writestr(
            "late-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("late-1.0.dist-info/RECORD", "")
        archive.writestr("late.pth", "import sys; sys.late_pth = True\n")
    async with session_of("userns") as sbx:
        await sbx.run_code("print('a waiting one comes after this')")
        await sbx.put_bytes(wheel.name, wheel.read_bytes())
        done = await sbx.exec(f"uv pip install --offline --no-index ./{wheel.name}", timeout_s=60)
        assert done.ok, done.stderr
        code = "import late, sys; print(late.VALUE, sys.late_pth)"
        assert await sbx.run_code(code) == "late True\n"
        # The one that was waiting while the package came was not used; one of the next is. Not
        # always the very next: the first import of a package changes the venv once more.
        assert taken == [False, False]
        for _ in range(10):
            assert await sbx.run_code(code) == "late True\n"
            if taken[-1]:
                break
    assert taken[-1]


@pytest.mark.spec("C5")
@pytest.mark.parametrize(
    "name", ["PYTHONHASHSEED", "LD_LIBRARY_PATH", "LC_ALL", "MALLOC_ARENA_MAX"]
)
async def test_what_acts_at_the_start_takes_a_fresh_one(name: str, taken: list[bool]) -> None:
    async with session_of("userns") as sbx:
        await sbx.run_code("pass")
        taken.clear()
        out = await sbx.run_code(f"import os; print(os.environ[{name!r}])", env={name: "0"})
        assert (out, taken) == ("0\n", [])


@pytest.mark.spec("C5", "C6")
async def test_environment_and_directory_of_the_call_reach_a_waiting_one(taken: list[bool]) -> None:
    async with session_of("userns", env={"A": "session", "B": "session"}) as sbx:
        await sbx.run("mkdir sub")
        await sbx.run_code("pass")
        out = await sbx.run_code(
            "import os; print(os.environ['A'], os.environ['B'], os.getcwd())",
            env={"B": "call"},
            cwd="sub",
        )
        assert out == f"session call {sbx.work_dir}/sub\n"
        assert taken[-1] is True
        with pytest.raises(sb.SandboxUsageError, match="cwd"):
            await sbx.run_code("pass", cwd="nowhere")


@pytest.mark.spec("C7", "D7")
async def test_a_waiting_one_obeys_time_limits_signals_and_cancellation(taken: list[bool]) -> None:
    async with session_of("userns") as sbx:
        await sbx.run_code("pass")
        await one_waits(sbx)
        done = await sbx.exec("import time; time.sleep(30)", script_type="python", timeout_s=0.3)
        assert (done.returncode, done.termination_reason) == (143, "timeout")
        await one_waits(sbx)
        proc = await sbx.run("import time; time.sleep(30)", script_type="python", stdout=True)
        proc.kill()
        assert await proc.wait() == 137
        await one_waits(sbx)
        task = asyncio.create_task(sbx.run_code("import time; time.sleep(30)"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert taken == [False, True, True, True]


async def test_a_waiting_one_that_was_killed_is_not_used(taken: list[bool]) -> None:
    from tests.conftest import children_of, descendants

    from union.sandbox._linux.launcher import Launcher

    async with session_of("userns") as sbx:
        await sbx.run_code("pass")
        await asyncio.sleep(0.3)
        launcher = Launcher._current
        assert launcher is not None
        victims = [p for c in children_of(launcher.pid) for p in descendants(c)]
        assert victims, "a waiting Python was there to be killed"
        for pid in victims:
            os.kill(pid, 9)
        await asyncio.sleep(0.1)
        assert await sbx.run_code("print('fine')") == "fine\n"
        assert taken == [False, False]


async def test_preload_imports_ahead_and_only_inside() -> None:
    import sys

    async with session_of("userns", preload=("tabnanny",)) as sbx:
        await sbx.run_code("pass")
        await one_waits(sbx)
        assert await sbx.run_code("import sys; print('tabnanny' in sys.modules)") == "True\n"
    assert "tabnanny" not in sys.modules


@pytest.mark.threat(46, 98)
@pytest.mark.spec("C8", "F1")
async def test_what_an_open_run_leaves_in_the_venv_does_not_wait_with_its_network(
    taken: list[bool],
) -> None:
    """A planted .pth file runs in every Python of the session; none waits on the open network."""
    plant = (
        "import pathlib, sysconfig\n"
        "site = pathlib.Path(sysconfig.get_path('purelib'))\n"
        '(site / \'A.pth\').write_text(\'import os; open(os.environ["HOME"] + "/ran", "a")'
        '.write(os.readlink("/proc/self/ns/net") + chr(10))\\n\')'
    )
    async with session_of("userns") as sbx:
        await sbx.run_code(plant, network_mode="open")
        await sbx.run("rm -f ran")
        await sbx.run_code("pass", network_mode="open")
        during = (await sbx.get_bytes("ran")).split()
        assert during, "the plant works: it ran in the run itself"
        await asyncio.sleep(0.5)
        assert (await sbx.get_bytes("ran")).split() == during, "and nowhere else since"
        await sbx.run_code("pass", network_mode="open")
    assert taken == [False, False, False]


@pytest.mark.parametrize("wrong", ["numpy", [1], ["a b"], 5])
def test_preload_takes_module_names(wrong: object) -> None:
    with pytest.raises(sb.SandboxUsageError, match="preload"):
        session_of("userns", preload=wrong)


@pytest.mark.parametrize("wrong", [-1, 1000, "yes", None, 1.5])
def test_warm_takes_a_number(wrong: object) -> None:
    with pytest.raises(sb.SandboxUsageError, match="warm"):
        session_of("userns", warm=wrong)
