"""Wrong calls: refused before anything starts, naming the argument and what is accepted.

Most of them are rejected by the session itself, before it calls its transport: that is
proven once, with a transport that must not be used, and holds over every way. The others are tried
over a backend and a server; ``EVERYWHERE=1`` tries them over every way.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
import pytest_asyncio
from tests.conftest import (
    REMOTE_WAYS,
    WAYS,
    OpenSession,
    eventually,
    host_dir,
    marked,
    sandbox_processes,
    session_of,
)

from union import sandbox as sb
from union.sandbox._session.lifecycle import SingleUseLifecycle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

in_one_loop = pytest.mark.asyncio(loop_scope="module")
ENTRANCES = ("userns", "remote-userns")
"""One way for each function that makes a session: the backend's name is one of its arguments."""
EVERY = (*WAYS, *REMOTE_WAYS) if os.environ.get("EVERYWHERE") == "1" else ENTRANCES
"""The engine and the server check what reaches them before they know the backend."""


class Untouchable:
    """A transport that may be opened and closed, and used for nothing else."""

    work_dir = "/work"
    is_known = False

    def __init__(self) -> None:
        self.used: list[str] = []

    async def open(self) -> None:
        """Nothing to do."""

    async def aclose(self) -> None:
        """Nothing to do."""

    def __getattr__(self, name: str) -> NoReturn:
        self.used.append(name)
        raise AssertionError(f"the transport was called: {name!r}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing() -> AsyncIterator[sb.Session]:
    """A session that must refuse a call by itself: its transport does nothing."""
    spec = session_of("userns")._spec
    lifecycle = SingleUseLifecycle(spec, Untouchable)  # type: ignore[arg-type]  # on purpose
    async with sb.Session(spec, lifecycle) as session:
        yield session


@pytest.fixture
def untouched(refusing: sb.Session) -> Iterator[sb.Session]:
    """The same, with the proof that the transport was not called."""
    yield refusing
    assert refusing._transport.used == []  # type: ignore[union-attr]  # ours
    assert not refusing._processes


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=marked(*EVERY))
async def sbx(request: pytest.FixtureRequest) -> AsyncIterator[sb.Session]:
    """One session for all: a call that is refused changes nothing."""
    async with session_of(request.param) as session:
        yield session


SURROGATE = "\ud800"
BAD_RUN = {
    "NUL in an env value": ("env", {"A": "a\0b"}),
    "NUL in an env name": ("env", {"A\0": "b"}),
    "= in an env name": ("env", {"A=B": "c"}),
    "empty env name": ("env", {"": "c"}),
    "int env value": ("env", {"A": 1}),
    "None env value": ("env", {"A": None}),
    "bytes env value": ("env", {"A": b"x"}),
    "bytes env name": ("env", {b"A": "x"}),
    "env a list": ("env", ["A=B"]),
    "env a str": ("env", "A=B"),
    "env with a lone surrogate": ("env", {"A": SURROGATE}),
    "env value over the kernel's limit": ("env", {"A": "x" * 200_000}),
    "stdout a str": ("stdout", "pipe"),
    "stdout an int": ("stdout", 1),
    "stdout subprocess.PIPE": ("stdout", -1),
    "stdout a file": ("stdout", object()),
    "stderr a str": ("stderr", "stdout"),
    "stderr subprocess.STDOUT": ("stderr", -2),
    "stdin a str": ("stdin", "text"),
    "stdin an int": ("stdin", 0),
    "stdin INHERIT": ("stdin", sb.INHERIT),
    "unknown script type": ("script_type", "bash"),
    "script type None": ("script_type", None),
    "unknown network mode": ("network_mode", "closed"),
    "network mode a bool": ("network_mode", True),
    "negative timeout": ("timeout_s", -1),
    "zero timeout": ("timeout_s", 0),
    "NaN timeout": ("timeout_s", math.nan),
    "infinite timeout": ("timeout_s", math.inf),
    "timeout a str": ("timeout_s", "5"),
    "timeout a bool": ("timeout_s", True),
    "empty cwd": ("cwd", ""),
    "NUL in cwd": ("cwd", "a\0b"),
    "cwd an int": ("cwd", 3),
    "cwd with a lone surrogate": ("cwd", SURROGATE),
    "background an int": ("background", 1),
    "negative cap": ("max_output_bytes", -1),
    "cap a float": ("max_output_bytes", 1.5),
    "cap a bool": ("max_output_bytes", True),
}
BAD_COMMANDS = {
    "empty": "",
    "blank": " \n\t ",
    "NUL": "echo a\0b",
    "lone surrogate": f"echo {SURROGATE}",
    "bytes": b"echo",
    "None": None,
    "int": 5,
    "empty list": [],
    "list with an empty program": ["", "x"],
    "list with an int": ["echo", 1],
    "list with None": ["echo", None],
    "list with bytes": ["echo", b"x"],
    "list with a path": ["echo", Path("x")],
    "list with NUL": ["echo", "a\0b"],
    "list with a huge argument": ["echo", "x" * 200_000],
    "dict": {"echo": 1},
    "generator": (x for x in ["echo"]),
}
BAD_SESSION = {
    "unknown backend": ("backend", "docker"),
    "backend None": ("backend", None),
    "relative work dir": ("host_work_dir", "relative/dir"),
    "empty work dir": ("host_work_dir", ""),
    "work dir bytes": ("host_work_dir", b"/tmp"),
    "work dir with NUL": ("host_work_dir", "/tmp\0x"),
    "work dir an int": ("host_work_dir", 3),
    "unknown network mode": ("network_mode", "off"),
    "negative timeout": ("timeout_s", -0.1),
    "zero timeout": ("timeout_s", 0),
    "NaN timeout": ("timeout_s", math.nan),
    "infinite timeout": ("timeout_s", math.inf),
    "env with =": ("env", {"A=": "x"}),
    "env with NUL": ("env", {"A": "\0"}),
    "env int": ("env", {"A": 1}),
    "paths a str": ("read_only_paths", "/usr"),
    "relative path": ("read_only_paths", ["usr"]),
    "path an int": ("read_write_paths", [3]),
    "path with NUL": ("read_write_paths", ["/a\0b"]),
    "strict a str": ("strict", "yes"),
    "resources a dict": ("resources", {"memory": "1Gi"}),
    "resources with bad memory": ("resources", sb.Resources(memory="lots")),
    "resources with too little memory": ("resources", sb.Resources(memory="1Mi")),
    "resources with no processes": ("resources", sb.Resources(processes=0)),
    "resources with negative cpu": ("resources", sb.Resources(cpu=-1)),
}


@in_one_loop
@pytest.mark.spec("C10", "C2", "C5", "C6", "D8")
@pytest.mark.parametrize("case", BAD_RUN)
async def test_a_wrong_argument_of_run(untouched: sb.Session, case: str) -> None:
    argument, value = BAD_RUN[case]
    with pytest.raises(sb.SandboxUsageError, match=argument) as caught:
        await untouched.run("touch started", **{argument: value})
    assert caught.value.argument == argument
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 500


@in_one_loop
@pytest.mark.spec("C10")
async def test_a_refused_call_starts_nothing(sbx: sb.Session) -> None:
    """The whole way down, with a command that would be seen; each wrong argument in turn."""
    for argument, value in BAD_RUN.values():
        with pytest.raises(sb.SandboxUsageError, match=argument):
            await sbx.run("touch started", **{argument: value})
    assert not Path(host_dir(sbx), "started").exists()
    assert eventually(lambda: not sandbox_processes())
    await sbx.run("touch started")
    assert Path(host_dir(sbx), "started").exists()
    await sbx.remove("started")


@in_one_loop
@pytest.mark.spec("C10")
async def test_control_a_right_call_does_ask_the_transport(refusing: sb.Session) -> None:
    with pytest.raises(AssertionError, match="called: 'start'"):
        await refusing.run("touch started")
    assert refusing._transport.used.pop() == "start"  # type: ignore[union-attr]  # ours


@in_one_loop
@pytest.mark.spec("C10", "C1")
@pytest.mark.parametrize("case", BAD_COMMANDS)
async def test_a_wrong_command(untouched: sb.Session, case: str) -> None:
    with pytest.raises(sb.SandboxUsageError, match="cmd") as caught:
        await untouched.run(BAD_COMMANDS[case])  # type: ignore[arg-type]
    assert caught.value.argument == "cmd"
    assert len(str(caught.value)) < 500


@in_one_loop
@pytest.mark.spec("C10", "C4")
@pytest.mark.parametrize("code", ["", "  \n", "x = '\0'", b"print(1)", ["print"], None])
async def test_wrong_source(untouched: sb.Session, code: object) -> None:
    with pytest.raises(sb.SandboxUsageError, match="cmd"):
        await untouched.run_code(code)  # type: ignore[arg-type]


@in_one_loop
@pytest.mark.spec("C10")
@pytest.mark.parametrize("call", ["run", "exec", "run_code"])
async def test_an_argument_that_does_not_exist(untouched: sb.Session, call: str) -> None:
    with pytest.raises(TypeError, match="shell"):
        await getattr(untouched, call)("true", shell=True)


@in_one_loop
@pytest.mark.spec("C9", "C10")
@pytest.mark.parametrize(
    "options",
    [
        {"network_allowlist": ["example.com"]},
        {"network_mode": "open", "network_allowlist": ["example.com"]},
        {"network_mode": "allowlist"},
        {"network_mode": "allowlist", "network_allowlist": "example.com"},
        {"network_mode": "allowlist", "network_allowlist": [5]},
        {"network_mode": "allowlist", "network_allowlist": ["http://example.com/x"]},
    ],
)
async def test_an_allowlist_that_makes_no_sense(untouched: sb.Session, options: dict) -> None:
    with pytest.raises(sb.PolicyError, match="network_allowlist"):
        await untouched.run("touch started", **options)


@pytest.mark.spec("B1", "C10")
@pytest.mark.parametrize("way", ENTRANCES)
@pytest.mark.parametrize("case", BAD_SESSION)
def test_a_wrong_argument_of_session(way: str, case: str) -> None:
    argument, value = BAD_SESSION[case]
    with pytest.raises(sb.SandboxUsageError, match=argument) as caught:
        session_of(way, **{argument: value})
    assert caught.value.argument == argument


@pytest.mark.spec("C9", "C10")
@pytest.mark.parametrize("way", ENTRANCES)
@pytest.mark.parametrize(
    "options",
    [
        {"network_allowlist": ["example.com"]},
        {"network_mode": "allowlist"},
        {"network_mode": "blocked", "network_denylist": ["example.com"]},
        {"network_mode": "blocked", "network_proxy_url": "http://proxy.example:3128"},
        {"network_mode": "open", "network_proxy_url": "ftp://proxy.example"},
        {"network_mode": "open", "network_socks_url": "http://proxy.example"},
    ],
)
def test_a_network_policy_that_makes_no_sense(open_session: OpenSession, options: dict) -> None:
    with pytest.raises(sb.PolicyError, match="network_"):
        open_session(**options)


@pytest.mark.spec("B3", "C10")
async def test_a_work_dir_that_is_none(open_session: OpenSession, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    for path in (
        tmp_path / "missing",
        tmp_path / "file",
        tmp_path / "dangling",
        "/",
        "/usr",
        "/tmp",
    ):
        session = open_session(host_work_dir=str(path))
        with pytest.raises(sb.SandboxUsageError, match="host_work_dir") as caught:
            await session.open()
        assert str(path) in str(caught.value)
        with pytest.raises(sb.SessionClosedError):
            await session.exec("true")


@in_one_loop
@pytest.mark.spec("E1", "C10")
@pytest.mark.parametrize("data", ["text", None, 5, ["x"], object()])
async def test_put_takes_bytes(sbx: sb.Session, data: object) -> None:
    with pytest.raises(sb.SandboxUsageError, match="data") as caught:
        await sbx.put_bytes("f", data)  # type: ignore[arg-type]
    assert caught.value.argument == "data"
    assert not Path(host_dir(sbx), "f").exists()


@in_one_loop
@pytest.mark.spec("E1", "C10")
@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o1777, 0o10644, -1, 1.5, "644", None, True])
async def test_set_id_bits_and_other_modes_are_refused(sbx: sb.Session, mode: object) -> None:
    with pytest.raises(sb.SandboxUsageError, match="mode") as caught:
        await sbx.put_bytes("f", b"", mode=mode)  # type: ignore[arg-type]
    assert caught.value.argument == "mode"
    assert not Path(host_dir(sbx), "f").exists()


@in_one_loop
@pytest.mark.spec("E1", "C10")
@pytest.mark.parametrize("overwrite", [1, "no", None])
async def test_overwrite_is_a_flag(untouched: sb.Session, overwrite: object) -> None:
    with pytest.raises(sb.SandboxUsageError, match="overwrite"):
        await untouched.put_bytes("f", b"", overwrite=overwrite)  # type: ignore[arg-type]


@in_one_loop
@pytest.mark.spec("E1", "C10")
@pytest.mark.parametrize("path", ["", "a\0b", None, 5, SURROGATE, "x" * 256, "a/" * 3000, ".", "/"])
async def test_paths_that_name_no_file(sbx: sb.Session, path: object) -> None:
    for call in (sbx.get_bytes(path), sbx.put_bytes(path, b"")):  # type: ignore[arg-type]
        with pytest.raises(sb.SandboxUsageError, match="path"):
            await call


@in_one_loop
@pytest.mark.spec("E1", "C10")
@pytest.mark.parametrize("limit", [-1, 1.5, "5", True, None])
async def test_max_bytes(untouched: sb.Session, limit: object) -> None:
    with pytest.raises(sb.SandboxUsageError, match="max_bytes") as caught:
        await untouched.get_bytes("there", max_bytes=limit)  # type: ignore[arg-type]
    assert caught.value.argument == "max_bytes"


@in_one_loop
@pytest.mark.spec("D1", "C10")
@pytest.mark.parametrize("limit", [-1, 1.5, "5", True])
async def test_the_cap_of_communicate(sbx: sb.Session, limit: object) -> None:
    proc = await sbx.run("echo x", stdout=True)
    with pytest.raises(sb.SandboxUsageError, match="max_output_bytes"):
        await proc.communicate(max_output_bytes=limit)  # type: ignore[arg-type]
    assert await proc.communicate() == (b"x\n", b"")


@pytest.mark.spec("C10")
@in_one_loop
@pytest.mark.parametrize("call", ["run", "exec", "run_code"])
async def test_an_unknown_argument_names_the_nearest(sbx: sb.Session, call: str) -> None:
    with pytest.raises(sb.UnknownArgumentError) as caught:
        await getattr(sbx, call)("touch('ran')", timeout=5)
    assert caught.value.argument == "timeout"
    assert caught.value.hint == "did you mean 'timeout_s'?"
    assert not Path(host_dir(sbx), "ran").exists()


@pytest.mark.spec("C10")
@in_one_loop
@pytest.mark.parametrize(
    "argument, value, meant",
    [("network_mode", "off", "blocked"), ("script_type", "bash", "shell")],
)
async def test_a_near_miss_names_the_accepted_value(
    sbx: sb.Session, argument: str, value: str, meant: str
) -> None:
    options: dict[str, object] = {argument: value}
    with pytest.raises(sb.SandboxUsageError) as caught:
        await sbx.exec("true", **options)  # type: ignore[arg-type]
    assert caught.value.hint == f"did you mean {meant!r}?"


@pytest.mark.spec("C10")
@in_one_loop
async def test_a_forgotten_await_is_explained(sbx: sb.Session) -> None:
    for argument in ("cmd", "stdin", "cwd", "env"):
        forgotten = sbx.get_bytes("missing")
        options = {"cmd": "true", argument: forgotten}
        with pytest.raises(sb.SandboxUsageError) as caught:
            await sbx.exec(**options)  # type: ignore[arg-type]
        forgotten.close()
        assert caught.value.argument == argument
        assert "write `await` before" in caught.value.hint
    forgotten = sbx.get_bytes("missing")
    with pytest.raises(sb.SandboxUsageError) as caught:
        await sbx.put_bytes("copy", forgotten)  # type: ignore[arg-type]
    forgotten.close()
    assert "write `await` before" in caught.value.hint
