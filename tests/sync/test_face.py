"""The synchronous face: every name is there, and it works where plain code runs."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import inspect
import os
import pickle
import re
import sys
import threading
from typing import TYPE_CHECKING, Any, Self

import pytest
from tests.conftest import SOON_S, WAYS, eventually, sandbox_processes, session_of
from tests.servers import shared_server

from union import sandbox as sb
from union.sandbox import sync
from union.sandbox.sync import _faces, _portal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

BACKEND = "userns"


@pytest.fixture
def sbx() -> Iterator[sync.Session]:
    with sync.on_device.session(backend=BACKEND) as session:
        yield session


@pytest.mark.spec("O1")
def test_every_public_name_is_there() -> None:
    assert set(sync.__all__) == set(sb.__all__) - {"sync"} | {"wrap"}
    for name in sync.__all__:
        assert getattr(sync, name) is not None
    assert dir(sync) == sorted(sync.__all__)
    with pytest.raises(AttributeError, match="no attribute 'sessions'"):
        sync.sessions  # type: ignore[attr-defined]  # noqa: B018 - the look-up is the test


def async_classes() -> list[type]:
    """Every class of the package that a caller meets and that has a face, found by looking.

    From the public names on: bases, and the classes that annotations of public members name.
    """
    public = [
        getattr(module, name)
        for module in (sb, sb.on_device, sb.remote)
        for name in module.__all__
        if name != "sync"
    ]
    ours = {
        cls.__name__: cls
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("union.sandbox")
        for cls in vars(module).values()
        if inspect.isclass(cls) and cls.__module__.startswith("union.sandbox")
    }
    waiting = [value for value in public if inspect.isclass(value) or inspect.isfunction(value)]
    waiting.append(ours["ProcessStdin"])  # an attribute of its process, which has no annotation
    found: set[type] = set()
    seen: set[object] = set()
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        if inspect.isclass(value):
            if not value.__module__.startswith("union.sandbox") or not _faces.has_face(value):
                continue
            found.add(value)
            members = (member for _, member in inspect.getmembers_static(value))
            waiting += value.__mro__[1:-1]
            functions = [m.fget if isinstance(m, property) else m for m in members]
            waiting += filter(inspect.isfunction, functions)
        elif inspect.isfunction(value):
            names = re.findall(r"[A-Za-z_]+", str(value.__annotations__.get("return", "")))
            waiting += [ours[name] for name in names if name in ours]
    return sorted(found, key=lambda cls: cls.__name__)


@pytest.mark.spec("O1")
def test_the_classes_that_have_a_face_are_found() -> None:
    names = {cls.__name__ for cls in async_classes()}
    assert names >= {"Session", "SandboxSession", "SandboxProcess", "Context", "ProcessStdin"}


@pytest.mark.spec("O1")
def test_a_face_has_every_public_member_of_its_class() -> None:
    for cls in async_classes():
        check_members(cls, _faces.face_class(cls))


def check_members(cls: type, face: type) -> None:
    for name, value in inspect.getmembers_static(cls):
        if name.startswith("_"):
            continue
        if inspect.isfunction(value):
            member = inspect.getattr_static(face, name)
            assert not inspect.iscoroutinefunction(member), name
            assert not inspect.isasyncgenfunction(member), name
            expected = inspect.signature(value).parameters
            assert list(inspect.signature(member).parameters) == list(expected), name
        elif isinstance(value, property | functools.cached_property):
            assert isinstance(inspect.getattr_static(face, name), property), name
    assert not hasattr(face, "__aenter__")
    assert hasattr(face, "__enter__") == hasattr(cls, "__aenter__")
    assert hasattr(face, "__iter__") == hasattr(cls, "__aiter__")
    assert face.__module__ == "union.sandbox.sync"


@pytest.mark.spec("O1")
@pytest.mark.parametrize("module", ["on_device", "remote"])
def test_every_function_of_a_module_has_a_face(module: str) -> None:
    theirs, ours = getattr(sb, module), getattr(sync, module)
    assert set(ours.__all__) == set(theirs.__all__)
    for name in theirs.__all__:
        there, here = getattr(theirs, name), getattr(ours, name)
        if inspect.isfunction(there):
            assert not inspect.iscoroutinefunction(here), name
            assert inspect.signature(here) == inspect.signature(there), name
    assert issubclass(_faces.face_class(sb.SandboxSession), sync.Session)


@pytest.mark.spec("O1")
def test_documentation_says_nothing_of_await() -> None:
    for face in (sync.Session, sync.SandboxProcess, sync.SandboxSession):
        for name, value in inspect.getmembers(face):
            if not name.startswith("_"):
                text = inspect.getdoc(value) or ""
                assert "await " not in text, (face, name)
                assert "async with" not in text, (face, name)
    assert str(inspect.signature(sync.Session.run)).startswith("(self, cmd:")


@pytest.mark.spec("O1")
def test_commands_files_and_streams(sbx: sync.Session) -> None:
    assert isinstance(sbx, sync.Session)
    assert sbx.exec("echo out; exit 3").returncode == 3
    assert sbx.run_code("print(6 * 7)") == "42\n"
    assert sbx.put_bytes("d/f", b"data") == 4
    assert sbx.get_bytes("d/f") == b"data"
    assert [entry.path for entry in sbx.list_dir("d")] == ["d/f"]
    process = sbx.run("for i in 1 2 3; do echo $i; done; echo end >&2", stdout=True, stderr=True)
    assert isinstance(process, sync.SandboxProcess)
    assert list(process.iter_stdout_lines()) == ["1", "2", "3"]
    assert list(process.iter_stderr()) == [b"end\n"]
    assert process.wait() == 0
    echo = sbx.run("cat", stdin=sync.PIPE, stdout=True)
    assert echo.stdin is not None
    assert echo.stdin is echo.stdin
    echo.stdin.write(b"typed")
    echo.stdin.drain()
    echo.stdin.close()
    assert echo.communicate() == (b"typed", b"")
    assert "sync SandboxProcess ended 0" in repr(echo)
    with pytest.raises(sync.SandboxCommandError):
        sbx.exec("false", check=True)


@pytest.mark.spec("O1")
def test_lines_arrive_while_the_command_runs(sbx: sync.Session) -> None:
    process = sbx.run("echo up; cat", stdin=True, stdout=True)
    lines = process.iter_stdout_lines()
    assert next(lines) == "up"
    assert process.stdin is not None
    process.stdin.write(b"more\n")
    assert next(lines) == "more"
    process.stdin.close()
    assert list(lines) == []
    with pytest.raises(StopIteration):
        next(lines)


@pytest.mark.spec("O1")
def test_a_reader_may_stop_and_another_go_on(sbx: sync.Session) -> None:
    process = sbx.run("printf '1\n2\n3\n'", stdout=True)
    lines = process.iter_stdout_lines()
    assert next(lines) == "1"
    lines.close()  # type: ignore[attr-defined]  # generators have it, iterators need not
    assert list(process.iter_stdout_lines()) == ["2", "3"]


@pytest.mark.spec("O1")
def test_opening_by_hand_and_errors_in_plain_words() -> None:
    session = sync.on_device.session(backend=BACKEND)
    with pytest.raises(sync.SessionClosedError) as caught:
        session.exec("true")
    assert "use `with session` or `session.open()`" in caught.value.hint
    assert session.open() is session
    with pytest.raises(sync.SessionClosedError, match="open already"):
        session.open()
    with pytest.raises(sync.UnknownArgumentError, match="timeout_s"):
        session.exec("true", timeout=3)  # type: ignore[arg-type]  # the mistake
    session.close()
    session.close()
    with pytest.raises(sync.SessionClosedError, match="closed"):
        session.exec("true")


@pytest.mark.spec("O1")
def test_a_face_is_not_constructed() -> None:
    with pytest.raises(sync.SandboxUsageError, match="cannot be created directly") as caught:
        sync.Session()
    assert "sync.on_device.session()" in caught.value.hint


@pytest.mark.spec("O1")
async def test_inside_a_running_loop() -> None:
    with sync.on_device.session(backend=BACKEND) as session:
        assert session.exec("echo in a loop").stdout == "in a loop\n"
        async with session_of(BACKEND) as other:
            assert (await other.exec("echo beside")).stdout == "beside\n"


@pytest.mark.spec("O1", "R3")
def test_an_interrupt_right_after_the_wait_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come when the call has ended and its caller has not returned yet."""
    waited = _portal._Call.wait

    def wait(call: _portal._Call) -> None:
        monkeypatch.setattr(_portal._Call, "wait", waited)
        waited(call)
        raise KeyboardInterrupt

    monkeypatch.setattr(_portal._Call, "wait", wait)
    results: list[BaseException] = []

    def run() -> None:
        try:
            _portal.Portal.current().call(lambda: None, on_interrupt=None)
        except KeyboardInterrupt as exc:
            results.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert results


def test_many_threads_share_a_session(sbx: sync.Session) -> None:
    found: dict[int, str] = {}

    def work(number: int) -> None:
        found[number] = sbx.exec(f"echo {number}").stdout

    threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {n: f"{n}\n" for n in range(12)}


@pytest.mark.spec("O1", "R3")
def test_attaching_by_id(sbx: sync.Session) -> None:
    assert sync.on_device.attach(sbx.id) is sbx
    found: list[str] = []
    thread = threading.Thread(
        target=lambda: found.append(sync.on_device.attach(sbx.id).exec("echo shared").stdout)
    )
    thread.start()
    thread.join(30)
    assert found == ["shared\n"]

    async def asynchronous() -> str:
        return (await sb.on_device.attach(sbx.id).exec("echo from a loop")).stdout

    assert asyncio.run(asynchronous()) == "from a loop\n"
    gone = sbx.id
    sbx.close()
    with pytest.raises(sync.SessionClosedError, match="no session with the id"):
        sync.on_device.attach(gone)


@pytest.mark.spec("O1", "R3")
def test_attaching_over_a_server() -> None:
    server = shared_server(WAYS)
    access = {"endpoint": server.endpoint, "token": server.token}
    with sync.remote.session(**access, backend=BACKEND) as owner:
        owner.put_bytes("f", b"shared")
        with sync.remote.attach(owner.id, **access) as guest:
            assert guest.id == owner.id
            assert guest.get_bytes("f") == b"shared"
            process = guest.run("cat f; echo", stdout=True)
            assert list(process.iter_stdout_lines()) == ["shared"]
        assert owner.exec("cat f").stdout == "shared", "the owner's session goes on"


@pytest.mark.spec("O1")
def test_a_callback_must_not_wait_for_the_portal(sbx: sync.Session, tmp_path: Any) -> None:
    (tmp_path / "f").write_bytes(b"x")
    seen: list[sync.SandboxUsageError] = []

    def progress(done: int, total: int | None, path: str) -> None:
        with pytest.raises(sync.SandboxUsageError) as caught:
            sbx.exec("true")
        seen.append(caught.value)

    sbx.upload(tmp_path / "f", "f", progress=progress)
    assert {exc.code for exc in seen} == {"sync-in-callback"}
    assert sbx.exec("true").ok


@pytest.mark.spec("O1")
def test_a_callback_that_raises_ends_its_call_alone(sbx: sync.Session, tmp_path: Any) -> None:
    (tmp_path / "f").write_bytes(b"x")

    def progress(done: int, total: int | None, path: str) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        sbx.upload(tmp_path / "f", "f", progress=progress)
    assert sbx.exec("true").ok


@pytest.mark.spec("O1")
def test_a_session_that_is_dropped_is_closed() -> None:
    session = sync.on_device.session(backend=BACKEND).open()
    process = session.run("echo up; sleep 60", stdout=True)
    assert next(process.iter_stdout_lines()) == "up"
    work = session.work_dir
    del session
    gc.collect()
    assert process.returncode is None, "the process keeps its session"
    del process
    gc.collect()
    assert eventually(lambda: not os.path.exists(work))
    assert eventually(lambda: not sandbox_processes())


@pytest.mark.spec("O1")
def test_closed_sessions_are_forgotten() -> None:
    for _ in range(3):
        with sync.on_device.session(backend=BACKEND):
            pass
    portal = _portal.running()
    assert portal is not None
    assert portal._kept == {}


@pytest.mark.spec("O1")
async def test_a_session_of_the_asynchronous_api_is_wrapped() -> None:
    async with session_of(BACKEND) as session:
        face = sync.wrap(session)
        assert isinstance(face, sync.Session)
        assert sync.wrap(session) is face
        assert await asyncio.to_thread(lambda: face.exec("echo both").stdout) == "both\n"
        with pytest.raises(sb.SandboxUsageError, match="would block the event loop") as caught:
            face.exec("true")
        assert caught.value.code == "sync-in-callback"
        face = sync.wrap(3)
        gc.collect()
        assert (await session.exec("echo still")).stdout == "still\n"
    assert face == 3


@pytest.mark.spec("O1")
def test_a_reference_to_a_cluster_session_pickles_and_copies() -> None:
    with sync.session(local=True, sandbox_mode="userns") as owner:
        assert isinstance(owner, sync.SandboxSession)
        assert owner.is_owner
        owner.put_bytes("f", b"x")
        for reference in (pickle.loads(pickle.dumps(owner)), copy.copy(owner)):
            assert isinstance(reference, sync.SandboxSession)
            assert not reference.is_owner
            assert reference.name == owner.name
            assert reference.get_bytes("f") == b"x"
            reference.close()
        assert owner.exec("echo still").stdout == "still\n"


# What is added to the asynchronous API later appears without a change here.


class _Inner:
    async def value(self) -> int:
        return 7


class _Added:
    """Members of every kind that the generator and the portal know."""

    def __init__(self) -> None:
        self.inner = _Inner()
        self.entered = False

    async def make(self) -> _Inner:
        return self.inner

    async def several(self) -> tuple[_Inner, ...]:
        return self.inner, _Inner()

    async def take(self, other: _Inner) -> bool:
        return other is self.inner

    async def count(self, number: int) -> AsyncIterator[int]:
        for n in range(number):
            yield n

    async def __aiter__(self) -> AsyncIterator[int]:
        yield 1

    async def __aenter__(self) -> Self:
        self.entered = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.entered = False

    @contextlib.asynccontextmanager
    async def managed(self) -> AsyncIterator[_Inner]:
        yield self.inner


_Inner.__module__ = _Added.__module__ = "union.sandbox._session.later"


@pytest.mark.spec("O1")
def test_members_of_every_kind_have_a_face() -> None:
    made = _Added()
    face = sync.wrap(made)
    assert face.make().value() == 7
    assert face.inner is face.make()
    assert [item.value() for item in face.several()] == [7, 7]
    assert face.take(face.inner)
    assert list(face.count(3)) == [0, 1, 2]
    with face as entered:
        assert entered is face
        assert made.entered
    assert not made.entered
    with face.managed() as inner:
        assert inner.value() == 7
