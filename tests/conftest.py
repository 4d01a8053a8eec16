"""What every test shares: ways to open a session, and the check that nothing is left behind."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.servers import running_server, shared_server

from union import sandbox as sb
from union.sandbox._linux import host_programs
from union.sandbox._linux.launcher import BINARY
from union.sandbox._linux.pinning import Places

WAYS = ("bubblewrap", "userns", "none")
"""Backends. A new one joins the contract suite, on this machine and remote, by being named here."""
ISOLATED = tuple(way for way in WAYS if way != "none")
REMOTE = "remote-"
"""Before a backend: the same over a server on this machine."""
REMOTE_WAYS = tuple(REMOTE + way for way in WAYS)


@pytest.fixture(autouse=True, scope="module")
def what_was_loaded_stays() -> None:
    """The collection after each test looks at what the tests of its module made, and at no more.

    Else it takes longer than most tests: a worker loads ever more, such as the SDK of Flyte.
    """
    gc.collect()
    gc.freeze()


TOGETHER = frozenset(
    f"tests/{name}.py"
    for name in (
        "cluster/test_plane_bringup",
        "cluster/test_plane_guests",
        "cluster/test_plane_lifetime",
        "cluster/test_plane_programs",
        "console/test_console",
        "contract/test_bad_input",
        "docs/test_examples",
        "docs/test_site",
        "escape/test_kernel_surface",
        "integration/test_doctor",
        "packaging/test_dist",
        "plane/test_plane",
        "remote/test_behind_a_proxy",
        "remote/test_own_server",
        "remote/test_tls",
        "spares/test_system_calls",
        "spares/test_waiting_pythons",
        "unit/test_seccomp",
    )
)
"""Modules whose tests share what is expensive to make, so that one worker runs all of them."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a module in ``TOGETHER`` on one worker, and begin with those modules.

    Not by the mark ``xdist_group``: pytest 9.2 has no place any more for what it adds to an id.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return path if path in TOGETHER else nodeid

    return Scheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--only-way",
        choices=[*WAYS, *REMOTE_WAYS],
        help="of the tests that are repeated over several ways, run this one alone",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(OnlyWay(config.getoption("--only-way")))


class OnlyWay:
    """Leaves out the tests whose parameters name another way than the one that was asked for."""

    def __init__(self, way: str | None) -> None:
        self._others = set() if way is None else {*WAYS, *REMOTE_WAYS} - {way}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        dropped = [item for item in items if self._others.intersection(_named(item))]
        if dropped:
            items[:] = [item for item in items if item not in set(dropped)]
            config.hook.pytest_deselected(items=dropped)


def _named(item: pytest.Item) -> set[str]:
    call = getattr(item, "callspec", None)
    values = () if call is None else call.params.values()
    return {value for value in values if isinstance(value, str)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each report says which rows of the catalogue its test attacks: scripts/test.py sums up."""
    for item in items:
        rows = {row for mark in item.iter_markers("threat") for row in mark.args}
        if rows:
            item.user_properties.append(("threats", " ".join(map(str, sorted(rows)))))


OpenSession = Callable[..., sb.Session]


def session_of(way: str, **options: object) -> sb.Session:
    """A session of one way; warnings of the way itself are expected."""
    if way.startswith(REMOTE):
        server = shared_server(WAYS)
        reach = {"endpoint": server.endpoint, "token": server.token, "lazy": False}
        return sb.remote.session(**{"backend": way.removeprefix(REMOTE), **reach, **options})  # type: ignore[arg-type]
    return sb.on_device.session(**{"backend": way, **options})  # type: ignore[arg-type]  # options of the test


def host_dir(session: sb.Session) -> str:
    """Where an open session's work dir is on this machine; the sandbox may see it elsewhere."""
    transport = session._transport
    name = getattr(transport, "_name", None)
    if name is None or session.work_dir != str(shared_server(WAYS).work_dir):
        return session.work_dir
    return shared_server(WAYS).host_dir(name)


def marked(*ways: str) -> list[Any]:
    """Ways as parameters; the mark tells those that isolate nothing, wherever they run."""
    bare = ("none", REMOTE + "none")
    return [pytest.param(way, marks=pytest.mark.bare) if way in bare else way for way in ways]


@pytest.fixture(params=marked(*WAYS))
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def open_session(way: str) -> OpenSession:
    """Makes sessions of the way under test; the test opens and closes them."""
    return lambda **options: session_of(way, **options)


@pytest.fixture
async def sbx(way: str) -> AsyncIterator[sb.Session]:
    """An open session of the way under test."""
    async with session_of(way) as session:
        yield session


@pytest.fixture(params=ISOLATED)
async def jail(request: pytest.FixtureRequest) -> AsyncIterator[sb.Session]:
    """An open session of every way that isolates."""
    async with session_of(request.param) as session:
        yield session


@pytest.fixture
def trusted_dir() -> Iterator[Path]:
    """A directory that only root and this user can change, as the host wants it for programs."""
    for place in (Path.home(), Path(__file__).parent):
        try:
            path = tempfile.mkdtemp(prefix=".sandbox-tests-", dir=place)
        except OSError:
            continue
        (Path(path) / "probe").touch(0o755)
        search = host_programs.find("probe", places=Places(), before=(path,))
        (Path(path) / "probe").unlink()
        if search.program is not None:
            yield Path(path)
            shutil.rmtree(path)
            return
        shutil.rmtree(path)
    pytest.skip("every directory this user can write to lies below one that other users can write")


def descriptors() -> Counter[str]:
    """What this process holds open, by kind and path."""
    return _held("self")


def held_by_launcher() -> Counter[str]:
    """The same of the launcher."""
    from union.sandbox._linux.launcher import Launcher

    return _held(Launcher.current().pid)


def _held(pid: int | str) -> Counter[str]:
    found: Counter[str] = Counter()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        found[target.split(":[")[0]] += 1
    return found


def descendants(pid: int) -> set[int]:
    """Every process below ``pid``."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        try:
            tasks = os.listdir(f"/proc/{waiting[-1]}/task")
        except OSError:
            waiting.pop()
            continue
        current = waiting.pop()
        for task in tasks:
            try:
                children = Path(f"/proc/{current}/task/{task}/children").read_text().split()
            except OSError:
                continue
            fresh = set(map(int, children)) - found
            found |= fresh
            waiting.extend(fresh)
    return found


def sandbox_processes() -> set[int]:
    """Processes of sandboxes: everything below our launcher, the launcher itself left out.

    Sandboxes that wait to be used do not count, but no more of them than the product says it keeps.
    """
    from union.sandbox._linux.launcher import Launcher
    from union.sandbox._linux.spares import Budget

    found: set[int] = set()
    launcher = Launcher._current
    if launcher is not None:
        found |= _beyond_spares(launcher.pid, Budget.held())
    server = running_server()
    if server is not None:
        for pid in children_of(server.pid):
            found |= _beyond_spares(pid, int(server.metric("sandbox_spares")))
    return found


def _beyond_spares(launcher: int, spares: int) -> set[int]:
    found: set[int] = set()
    for first in children_of(launcher):
        tree = descendants(first)
        if spares and all(map(_waits, tree)):
            spares -= 1
        else:
            found |= {first, *tree}
    return found


def _waits(pid: int) -> bool:
    """Whether a process of a sandbox has not begun a command: a waiting Python, or still ours."""
    try:
        ours = os.path.samefile(f"/proc/{pid}/exe", BINARY)
    except OSError:
        return False
    return ours or os.path.exists(f"/proc/{pid}/fd/100")


def children_of(pid: int) -> set[int]:
    try:
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return set()


def interpreter_under(place: str) -> set[str]:
    """The name in ``place`` that leads to our own interpreter, which every sandbox shows."""
    ours = {os.path.relpath(prefix, place) for prefix in (sys.prefix, sys.base_prefix)}
    return {path.split("/")[0] for path in ours} - {".", ".."}


def eventually(check: Callable[[], bool], *, within_s: float = 3.0) -> bool:
    """Whether ``check`` becomes true soon."""
    end = time.monotonic() + within_s
    while not check():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """No sandbox process and no work dir of ours may outlive the test that made it."""
    if STARTS_NOTHING.intersection(request.path.relative_to(TESTS).parts[:1]):
        yield  # see below
        return
    before = _own_dirs()
    yield
    gc.collect()
    assert eventually(lambda: not sandbox_processes()), sandbox_processes()
    assert eventually(lambda: _own_dirs() <= before), _own_dirs() - before


TESTS = Path(__file__).parent
STARTS_NOTHING = frozenset({"house", "unit"})
"""Directories of tests that open no session: one look at the end of each module is enough."""


@pytest.fixture(autouse=True, scope="module")
def nothing_left_by_a_module() -> Iterator[None]:
    """The same for whole modules, whatever they are supposed to do."""
    before = _own_dirs()
    yield
    gc.collect()
    assert eventually(lambda: not sandbox_processes()), sandbox_processes()
    assert eventually(lambda: _own_dirs() <= before), _own_dirs() - before


def _own_dirs() -> set[str]:
    prefix = f"sandbox-{os.getpid()}-"
    found = {
        f"{place}/{name}"
        for place in ("/tmp", "/var/tmp")
        if os.path.isdir(place)  # a container may have one of them only
        for name in os.listdir(place)
        if name.startswith(prefix)
    }
    server = running_server()
    return found if server is None else found | set(map(str, server.work_dir.iterdir()))
