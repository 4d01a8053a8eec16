"""What every test shares: ways to open a session, and the check that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from tests import tiers
from tests.servers import running_server, shared_server

from union import sandbox as sb
from union.sandbox._linux import host_programs, kernel
from union.sandbox._linux.launcher import Launcher
from union.sandbox._linux.pinning import Places
from union.sandbox._macos.launcher import PortableLauncher
from union.sandbox._system import IS_LINUX

# A generated example may take any time: on a loaded machine each takes longer than the default.
hypothesis.settings.register_profile("any-load", deadline=None)
hypothesis.settings.load_profile("any-load")

# A shell lets its background jobs ignore Ctrl-C, and the programs of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

LAUNCHER = Launcher if IS_LINUX else PortableLauncher
LINUX_WAYS = ("bubblewrap", "userns")
WAYS = (*LINUX_WAYS, "none") if IS_LINUX else ("sandbox-exec", "none")
"""Backends. A new one joins the contract suite, on this machine and remote, by being named here."""
ISOLATED = tuple(way for way in WAYS if way != "none")
WITHOUT_NAMESPACES = ("landlock",)
"""Backends that keep the contract, but not the attack suites of the others; they have a suite of
their own."""
SERVED = (*WAYS, *WITHOUT_NAMESPACES) if IS_LINUX else WAYS
"""Backends that the server of the tests offers."""
MACHINE = "machine-"
"""Before a backend: the same in a session that keeps scratch files and processes."""
MACHINE_WAYS = tuple(MACHINE + way for way in ISOLATED) if IS_LINUX else ()
CHECKPOINTED = os.environ.get("CHECKPOINTED") == "1"
"""Whether the attacks are made in a session that has taken a checkpoint, so that its work dir is
layers: ``CHECKPOINTED=1 pytest tests/escape``."""
REMOTE = "remote-"
"""Before a backend: the same over a server on this machine."""
BARE = ("none", REMOTE + "none")
"""Ways that isolate nothing, wherever they run."""
REMOTE_WAYS = tuple(REMOTE + way for way in WAYS)
CONTEXT_WAYS = (*ISOLATED, *(REMOTE + way for way in ISOLATED))
"""Where the contract of contexts runs."""
REMOTE_MACHINE_WAYS = tuple(REMOTE + way for way in MACHINE_WAYS)
REMOTE_WITHOUT = tuple(REMOTE + way for way in SERVED if way not in WAYS)
EVERY_WAY = (
    *WAYS, *WITHOUT_NAMESPACES, *MACHINE_WAYS, *REMOTE_WAYS, *REMOTE_WITHOUT, *REMOTE_MACHINE_WAYS,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def what_was_loaded_stays() -> None:
    """The collection after each test looks at what the tests of its module made, and at no more.

    Else it takes longer than most tests: a worker loads ever more, such as the SDK of Flyte.
    """
    gc.collect()
    gc.freeze()


LONG = tuple(
    f"tests/{name}.py"
    for name in (
        "packaging/test_dist",
        "contract/test_timeouts_and_ends",
        "cluster/test_plane_lifetime",
        "environments/test_matrix",
        "docs/test_site_browser",
        "contract/test_lifecycle",
        "confined/test_attacks",
        "cluster/test_plane_bringup",
        "contract/test_contexts_ends",
        "contract/test_contexts",
        "cluster/test_plane_programs",
        "native/test_static_analysis",
        "escape/test_remote",
        "remote/test_hostile_clients",
        "cluster/test_plane_guests",
        "escape/test_networks_used_again",
        "docs/test_example_programs",
        "fuzz/test_fuzz",
        "network/test_load",
        "adapters/test_adapters",
        "cluster/test_attach",
        "spares/test_waiting_pythons",
        "contract/test_venv",
        "faults/test_steps",
        "cluster/test_examples",
        "faults/test_unkillable",
        "contract/test_contexts_hostile",
        "contract/test_streams",
        "contract/test_run",
        "cluster/test_local",
        "contract/test_machine",
        "escape/test_lifecycle",
        "remote/test_resume",
        "docs/test_site",
        "escape/test_call_paths",
        "remote/test_network_cut",
        "sync/test_process",
        "remote/test_lifecycle",
        "environments/test_floor",
        "contract/test_files",
        "cluster/test_plane_pods",
        "unit/test_tree_attacks",
        "remote/test_hostile_server",
        "cluster/test_documents_elsewhere",
        "cluster/test_local_line",
        "contract/test_contexts_saved",
        "typing/test_types",
        "faults/test_killed",
        "remote/test_back_off",
        "contract/test_call_posture",
    )
)
"""Modules that take long, the longest first. They begin first, so that the workers end together."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a module on one worker; begin with ``LONG``, then with large modules.

    So a module makes what its tests share once, and its tests do not disturb each other.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0]

        def _assign_work_unit(self, node: Any) -> None:
            following = [path for path in LONG if path in self.workqueue]
            if following:
                self.workqueue.move_to_end(following[0], last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--only-way",
        choices=EVERY_WAY,
        help="of the tests that are repeated over several ways, run this one alone",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(tiers.Marks())
    config.pluginmanager.register(OnlyWay(config.getoption("--only-way")))
    if IS_LINUX and kernel.is_gvisor():
        from tests import kernel_facts

        config.pluginmanager.register(kernel_facts.Exceptions())


class OnlyWay:
    """Leaves out the tests whose parameters name another way than the one that was asked for."""

    def __init__(self, way: str | None) -> None:
        # Tests of what only Linux has name its backends themselves, wherever they run.
        names = {*EVERY_WAY, *LINUX_WAYS, *(REMOTE + name for name in LINUX_WAYS)}
        self._others = set() if way is None else names - {way}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        leave_out(config, items, lambda item: bool(self._others.intersection(named(item))))


def leave_out(
    config: pytest.Config, items: list[pytest.Item], unwanted: Callable[[pytest.Item], bool]
) -> None:
    """Deselect the items for which ``unwanted`` is true."""
    dropped = {item: None for item in items if unwanted(item)}
    if dropped:
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=list(dropped))


def named(item: pytest.Item) -> set[str]:
    """The texts among the parameters of a test: its way is one of them."""
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


class Face:
    """The face of the API that ``session_of`` uses: ``on_device`` and ``remote`` of the package, or
    the synchronous ones, behind a bridge (``tests/sync/bridge.py``)."""

    current: Any = sb


def session_of(way: str, **options: object) -> sb.Session:
    """A session of one way; warnings of the way itself are expected."""
    if way.startswith(MACHINE):
        return session_of(way.removeprefix(MACHINE), **{"persist": "machine", **options})
    if way.startswith(REMOTE + MACHINE):
        inner = REMOTE + way.removeprefix(REMOTE + MACHINE)
        return session_of(inner, **{"persist": "machine", **options})
    if way.startswith(REMOTE):
        server = shared_server(SERVED)
        reach = {"endpoint": server.endpoint, "token": server.token, "lazy": False}
        return Face.current.remote.session(
            **{"backend": way.removeprefix(REMOTE), **reach, **options}
        )
    return Face.current.on_device.session(**{"backend": way, **options})


def host_dir(session: sb.Session) -> str:
    """Where an open session's work dir is on this machine; the sandbox may see it elsewhere."""
    transport = session._transport
    name = getattr(transport, "name", None)
    if name is None or session.work_dir != str(shared_server(SERVED).work_dir):
        return session.work_dir
    return shared_server(SERVED).host_dir(name)


@contextlib.contextmanager
def shown_to_host(session: sb.Session) -> Iterator[str]:
    """Give a path of this process that shows the work dir of an open session as it is.

    The path of a work dir with layers shows only the lowest one.
    """
    fd = session._transport.work.tree.dup_root()
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def marked(*ways: str) -> list[Any]:
    """Ways as parameters; the mark tells those that isolate nothing, wherever they run."""
    return [pytest.param(way, marks=pytest.mark.bare) if way in BARE else way for way in ways]


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
        if CHECKPOINTED:
            await session.checkpoint()
        yield session


@pytest.fixture
def outside_tmp() -> Iterator[Path]:
    """A directory that is not below /tmp, where each sandbox has a directory of its own."""
    place = "/var/tmp" if os.path.isdir("/var/tmp") else Path.home()  # a container may lack it
    path = tempfile.mkdtemp(prefix="sbx-tests-", dir=place)
    yield Path(path)
    shutil.rmtree(path)


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
    return _held(LAUNCHER.current().pid)


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
    from union.sandbox._linux.spares import Budget

    found: set[int] = set()
    launcher = LAUNCHER._current
    if launcher is not None:
        found |= _beyond_spares(launcher.pid, Budget.held())
    server = running_server()
    if server is not None:
        for pid in children_of(server.pid):
            if children_of(pid):
                found |= _beyond_spares(pid, int(server.metric("sandbox_spares")))
    return found


def _beyond_spares(launcher: int, spares: int) -> set[int]:
    found: set[int] = set()
    for first in children_of(launcher):
        tree = descendants(first)
        if not tree and is_machine(first):
            continue
        if spares and all(map(_waits, tree)):
            spares -= 1
        else:
            found |= {first, *tree}
    return found


def is_machine(pid: int) -> bool:
    """Whether a process is the first of a machine, which waits as long as its session is open."""
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "machine\n"
    except OSError:
        return False


def _waits(pid: int) -> bool:
    """Whether a process of a sandbox has not begun a command: a waiting Python, or still ours."""
    try:
        ours = os.path.samefile(f"/proc/{pid}/exe", LAUNCHER.binary())
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


SOON_S = 25.0
"""Tells an end from a hang, under any load: what hangs in the tests does so for longer.

How fast something is belongs into the benchmark; no test fails for it.
"""


START = 6.0 if IS_LINUX and kernel.is_gvisor() else 1.0
"""How much longer a program takes to start than elsewhere: a time limit must not come before."""


RACE = 1.0 if os.environ.get("EVERYWHERE") == "1" else 0.35
"""The part of its full time that an attack by exchanging names gets; each also goes on until it has
seen both outcomes. Every second of it keeps two cores busy."""


def eventually(
    check: Callable[[], bool], *, within_s: float = SOON_S, every_s: float = 0.01
) -> bool:
    """Whether ``check`` becomes true soon."""
    end = time.monotonic() + within_s
    while not check():
        if time.monotonic() > end:
            return False
        time.sleep(every_s)
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
    gc.freeze()  # so that the next test looks at what it made itself, and at no more
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
