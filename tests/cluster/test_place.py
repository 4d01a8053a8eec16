"""Where a session runs: never in a weaker place than requested without a warning."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING

import flyte
import pytest

from union import sandbox as sb
from union.sandbox.cluster import _local
from union.sandbox.errors import SandboxWarning

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.threat(171), pytest.mark.spec("P6", "I8")]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a directory in which nothing configures Flyte."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Record the sessions that are started as a process of this machine."""
    found: list[object] = []
    real = _local.LocalServer

    def recorded(request: object) -> object:
        found.append(request)
        return real(request)

    monkeypatch.setattr(_local, "LocalServer", recorded)
    return found


async def test_running_on_this_machine_warns_with_the_reason(started):
    with pytest.warns(SandboxWarning, match="neither configured nor initialised") as seen:
        async with sb.session() as sbx:
            assert (await sbx.exec("echo here")).stdout == "here\n"
    assert len(seen) == 1
    assert seen[0].filename == __file__, "it names the line that called session()"
    assert "flyte.init(endpoint=...)" in str(seen[0].message)
    assert len(started) == 1


async def test_local_true_does_not_warn(started):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with sb.session(local=True) as sbx:
            assert (await sbx.exec("echo here")).stdout == "here\n"
    assert len(started) == 1


async def test_local_false_without_a_cluster_is_an_error(started):
    with pytest.raises(sb.SandboxUsageError, match="requires a cluster") as caught:
        await sb.session(local=False)
    assert (caught.value.code, caught.value.argument) == ("no-cluster", "local")
    assert "flyte.init" in caught.value.hint
    assert not started


@pytest.mark.parametrize("name", ["config.yaml", ".flyte/config.yaml"])
async def test_an_unused_configuration_file_is_named(name: str, tmp_path: Path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("admin:\n  endpoint: dns:///nowhere.example\n")
    with pytest.raises(sb.SandboxUsageError, match=f"configured by {name}") as caught:
        await sb.session(local=False)
    assert "init_from_config" in caught.value.hint
    with pytest.warns(SandboxWarning, match=f"configured by {name}, but not initialised"):
        sb.session().close()


async def test_an_unused_variable_is_named(monkeypatch):
    monkeypatch.setenv("FLYTE_API_KEY", "secret")
    with pytest.raises(sb.SandboxUsageError, match="the variable FLYTE_API_KEY") as caught:
        await sb.session(local=False)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("local", [None, True])
@pytest.mark.parametrize("by_name", [False, True])
async def test_gvisor_is_not_replaced_by_a_process_of_this_machine(started, local, by_name):
    name = f"place-gvisor-{local}-{by_name}".lower()
    made = sb.SandboxEnvironment(name=name, image="x", runtime="gvisor")
    with pytest.raises(sb.BackendUnavailableError, match="without gVisor") as caught:
        await sb.session(name if by_name else made, local=local)
    assert (caught.value.backend, caught.value.code) == ("gvisor", "no-cluster")
    assert not started
    plain = sb.SandboxEnvironment(name=f"{name}-plain", image="x")
    async with sb.session(plain, local=True) as sbx:
        assert (await sbx.exec("true")).ok, "the control"


async def test_an_environment_not_declared_here_is_named():
    with pytest.warns(SandboxWarning, match="isolation of the environment 'theirs' is not known"):
        sb.session("theirs").close()


async def test_the_warning_in_local_mode_explains_how_to_use_a_cluster():
    env = flyte.TaskEnvironment(name="place-task")

    @env.task
    async def required() -> str:
        try:
            await sb.session(local=False)
        except sb.SandboxUsageError as exc:
            return str(exc)
        return "started"

    run = await flyte.with_runcontext(mode="local").run.aio(required)
    warning = (await run.outputs.aio())[0]
    assert "Flyte's local mode" in warning
    assert "flyte run" in warning


@pytest.mark.parametrize("local", ["yes", 1, 0, [], "false"])
def test_local_must_be_none_true_or_false(local):
    with pytest.raises(sb.SandboxUsageError, match="local must be None"):
        sb.session(local=local)


# With and without await.


@pytest.mark.spec("A6", "I4")
async def test_every_spelling_gives_a_session():
    async with sb.session(local=True) as sbx:
        assert (await sbx.exec("echo 1")).stdout == "1\n"
    assert sbx._lifecycle.state == "closed"
    async with await sb.session(local=True) as sbx:
        assert (await sbx.exec("echo 2")).stdout == "2\n"
    sbx = await sb.session(local=True)
    try:
        assert await sbx is sbx
        assert (await sbx.exec("echo 3")).stdout == "3\n"
    finally:
        await sbx.close()
    both = await asyncio.gather(sb.session(local=True), asyncio.create_task(sb.session(local=True)))
    for sbx in both:
        await sbx.close()


@pytest.mark.spec("A6")
async def test_a_launch_is_awaited_once():
    launch = sb.session(local=True)
    sbx = await launch
    try:
        with pytest.raises(RuntimeError, match="awaited already"):
            await launch
    finally:
        await sbx.close()


@pytest.mark.spec("A6", "I4")
async def test_a_block_that_fails_closes_its_session():
    with pytest.raises(ZeroDivisionError):
        async with sb.session(local=True) as sbx:
            raise ZeroDivisionError
    with pytest.raises(sb.SessionClosedError):
        await sbx.exec("true")


def test_a_launch_that_is_never_awaited_is_reported(tmp_path: Path):
    program = "from union import sandbox as sb\nsb.session(local=True)\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=dict(os.environ),
    )
    assert "session(...) was never awaited" in done.stderr
