"""`sb.session()` on the stand-in for a control plane: from the call to the first command."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import flyte
import pytest
from google.protobuf.json_format import MessageToJson
from tests.conftest import SOON_S
from tests.plane.faults import NoPod
from tests.plane.plane import DOMAIN, PROJECT
from tests.plane.podspec import primary_of
from tests.plane.sandboxes import LONG_S, in_task, live_runs, phase, sandbox_plane, settled, until

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.plane.plane import Plane

pytestmark = [pytest.mark.timeout(120), pytest.mark.spec("I4")]


@pytest.fixture(scope="module")
def plane() -> Iterator[Plane]:
    with sandbox_plane() as plane:
        yield plane


@pytest.fixture(autouse=True)
def every_run_is_over(plane: Plane) -> Iterator[None]:
    yield
    settled(plane)


def plane_sessions() -> Any:
    """Tasks that use sessions; defined in this process once a plane is running."""
    import plane_sessions

    return plane_sessions


async def test_a_session_is_a_run_and_the_owner_ends_it(plane: Plane):
    before = datetime.now(UTC)
    sbx = await sb.session(name="whole-life", timeout=timedelta(minutes=5))
    assert (sbx.name, sbx.is_owner, sbx.endpoint, sbx.ip) == ("whole-life", True, "", None)
    assert sbx.url == f"{plane.endpoint}/v2/domain/{DOMAIN}/project/{PROJECT}/runs/whole-life"
    assert before <= sbx.created_at <= datetime.now(UTC)
    assert phase(plane, "whole-life") in {"QUEUED", "INITIALIZING", "RUNNING"}
    async with asyncio.timeout(LONG_S), sbx:
        pod = plane.pod("whole-life")
        assert sbx.ip == pod.ip
        assert f"//{pod.ip}:" in sbx.endpoint
        assert (await sbx.exec("echo hello")).stdout == "hello\n"
        await sbx.put_bytes(f"{sbx.work_dir}/kept", b"1")
        assert await sbx.get_bytes(f"{sbx.work_dir}/kept") == b"1"
        assert pod.processes()
        begun = time.monotonic()
    assert time.monotonic() - begun < SOON_S
    await until(lambda: not pod.processes(), within_s=SOON_S)
    assert phase(plane, "whole-life") in {"ABORTED", "SUCCEEDED"}
    assert pod.orphans == set()


async def test_a_name_is_generated_if_none_is_given(plane: Plane):
    plane.faults.start_delay_s = LONG_S
    sbx = await sb.session()
    assert re.fullmatch(r"sbx-[0-9a-f]{16}", sbx.name)
    assert sbx.name in live_runs(plane)
    await sbx.close()


async def test_bubblewrap_has_an_environment_of_its_own(plane: Plane):
    async with asyncio.timeout(LONG_S), await sb.session(sandbox_mode="bwrap") as sbx:
        assert (await sbx.exec("echo hello")).backend == "bubblewrap"
        action, pod = plane.action(sbx.name), plane.pod(sbx.name)
        assert action.details.metadata.task.id.name == "union-sandbox-bwrap.sandbox_server"
        granted = primary_of(pod.manifest["spec"])["securityContext"]["capabilities"]["add"]
        assert granted == ["SYS_ADMIN"]


LANDLOCK_ENV = sb.SandboxEnvironment(name="confined-sandbox", sandbox_mode="landlock")
CONFINED = """
import os, socket
def tried(action):
    try:
        return repr(action())
    except OSError as exc:
        return type(exc).__name__
print(tried(lambda: open({secret!r}).read()))
print(tried(lambda: open({secret!r}, "w").write("x")))
print(tried(lambda: socket.create_connection({server!r}, 5)))
print(tried(lambda: os.listdir("/proc")))
print(tried(lambda: os.kill({pid}, 0)))
print(tried(lambda: open("own", "w").write("kept")))
"""


@pytest.mark.spec("B9")
async def test_landlock_in_an_environment_of_its_own(plane: Plane, tmp_path: Path):
    """The pod asks for nothing; inside, the promises of the backend hold over the server."""
    flyte.deploy(LANDLOCK_ENV, version="1", copy_style="none")
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    secret.chmod(0o644)
    async with (
        asyncio.timeout(LONG_S),
        await sb.session(environment=LANDLOCK_ENV, network_mode="blocked") as sbx,
    ):
        done = await sbx.exec("echo hello; exit 3", timeout_s=20)
        assert (done.stdout, done.exit_code, done.backend) == ("hello\n", 3, "landlock")
        pod = plane.pod(sbx.name)
        security = primary_of(pod.manifest["spec"])["securityContext"]
        assert "SYS_ADMIN" not in security.get("capabilities", {}).get("add", [])
        report = sbx.isolation
        assert (report.backend, report.root, report.egress) == ("landlock", "host", "mediated")
        address = urlsplit(sbx.endpoint)
        program = CONFINED.format(
            secret=str(secret), server=(address.hostname, address.port), pid=os.getpid()
        )
        lines = (await sbx.run_code(program)).splitlines()
        assert lines == ["PermissionError"] * 5 + ["4"], lines
        assert secret.read_text() == "host secret"
        assert await sbx.get_bytes("own") == b"kept"
        late = await sbx.exec("sleep 30", timeout_s=0.2)
        assert late.termination_reason == "timeout"


async def test_resources_reach_the_pod_and_the_ceiling_inside(plane: Plane):
    wanted = flyte.Resources(cpu=1, memory="600Mi")
    async with asyncio.timeout(LONG_S), await sb.session(resources=wanted) as sbx:
        manifest = plane.pod(sbx.name).manifest
        assert primary_of(manifest["spec"])["resources"]["requests"] == {
            "cpu": "1",
            "memory": "600Mi",
        }
        # Overriding must keep these fields.
        assert "POD_IP" in {entry["name"] for entry in primary_of(manifest["spec"])["env"]}
        assert manifest["metadata"]["labels"]["union-sandbox"]
        too_much = await sbx.exec("python3 -c 'bytearray(700 * 2**20)'")
        assert too_much.returncode != 0


async def test_a_call_cannot_have_more_network_than_its_session(plane: Plane):
    async with asyncio.timeout(LONG_S), await sb.session(network_mode="blocked") as sbx:
        assert (await sbx.exec("true")).returncode == 0
        dial = "import socket; socket.create_connection(('192.0.2.1', 80), 1)"
        try:
            done = await sbx.exec(f'python3 -c "{dial}"', network_mode="open")
        except sb.SandboxError:
            return
        assert done.returncode != 0


async def test_the_platform_stores_no_token(plane: Plane):
    async with asyncio.timeout(LONG_S), await sb.session(name="no-key") as sbx:
        assert (await sbx.exec("echo hello")).returncode == 0
        keys = [sbx._handle.keys.owner, sbx._handle.keys.guest]
        action, pod = plane.action("no-key"), plane.pod("no-key")
        kept = {
            "details": MessageToJson(action.details),
            "run spec": MessageToJson(action.run.spec),
            "pod": json.dumps(pod.manifest),
            "log": pod.log,
            **{key: text.decode("latin-1") for key, text in plane.store.objects.items()},
        }
        assert [what for what, text in kept.items() for key in keys if key in text] == []


async def test_a_name_in_use_is_a_clear_error(plane: Plane):
    plane.faults.start_delay_s = LONG_S
    first = await sb.session(name="taken")
    with pytest.raises(sb.SandboxError, match="taken"):
        await sb.session(name="taken")
    assert not plane.action("taken").is_over
    await first.close()
    assert phase(plane, "taken") == "ABORTED"


async def test_one_of_two_owners_with_the_same_name_wins(plane: Plane):
    plane.faults.start_delay_s = LONG_S
    both = await asyncio.gather(
        *(sb.session(name="contested") for _ in range(2)), return_exceptions=True
    )
    won = [one for one in both if isinstance(one, sb.SandboxSession)]
    lost = [one for one in both if isinstance(one, sb.SandboxError)]
    assert (len(won), len(lost)) == (1, 1), both
    assert not plane.action("contested").is_over
    await won[0].close()


async def test_an_environment_that_is_not_deployed_is_named(plane: Plane):
    with pytest.raises(sb.SandboxError, match="nonesuch"):
        await sb.session("nonesuch")


async def test_a_failure_before_the_pod_exists_is_reported_at_once(plane: Plane):
    plane.faults.no_pod = NoPod()
    sbx = await sb.session(name="no-image")
    begun = time.monotonic()
    with pytest.raises(sb.SandboxError) as caught:
        await sbx
    assert time.monotonic() - begun < SOON_S
    message = str(caught.value)
    for part in ("failed", "the image could not be pulled", "Back-off pulling image"):
        assert part in message, message
    await sbx.close()
    with pytest.raises(sb.SandboxError):
        await sbx.exec("true")


async def test_a_task_that_ends_before_it_serves_is_reported(plane: Plane):
    plane.faults.pod_delay_s = LONG_S
    sbx = await sb.session(name="ends-early")
    await until(lambda: plane.action("ends-early").pod is not None)
    plane._do(_kill(plane.pod("ends-early")))
    plane.faults.pod_delay_s = 0
    plane._do(_abort(plane, "ends-early"))
    with pytest.raises(sb.SandboxError, match="by somebody else"):
        await asyncio.wait_for(sbx.open(), LONG_S)
    await sbx.close()


async def _kill(pod) -> None:
    await pod.end(0)


async def _abort(plane: Plane, run: str) -> None:
    plane._executor.abort(plane.action(run), "by somebody else")


async def test_a_server_that_never_becomes_ready_is_given_up(plane: Plane):
    plane.faults.start_delay_s = LONG_S
    sbx = await sb.session(name="too-slow", ready_timeout=0.5)
    begun = time.monotonic()
    with pytest.raises(sb.SandboxError, match=r"0\.5"):
        await sbx
    assert time.monotonic() - begun < SOON_S
    await sbx.close()
    assert phase(plane, "too-slow") == "ABORTED"


@pytest.mark.parametrize("how", ["watches", "connections"])
async def test_an_interrupted_watch_resumes(plane: Plane, how: str):
    sbx = await sb.session(name=f"cut-{how}")
    opening = asyncio.create_task(sbx.open())
    name = f"cut-{how}"
    for _ in range(3):
        await asyncio.to_thread(
            plane.faults.cut_watches if how == "watches" else plane.cut_connections
        )
        await asyncio.sleep(0.3)
    async with asyncio.timeout(LONG_S):
        await opening
        assert (await sbx.exec("echo hello")).stdout == "hello\n"
    await sbx.close()
    assert plane.action(name).is_over


@pytest.mark.parametrize("way", ["log only", "object only", "object, and no log service"])
async def test_one_source_of_the_announcement_is_enough(plane: Plane, way: str):
    """The announcement is in the log, and in an object of the caller's task; either may lag."""
    name = f"by-{way.replace(', and', '').replace(' ', '-')}"
    if way == "log only":
        plane.store.refused = "union-sandbox"
    elif way == "object only":
        plane.faults.log_lag_s = 2 * LONG_S
    else:
        plane.faults.logs_down = True
    assert await in_task(plane_sessions().opens, name=name) == "from a pod\n"
    assert plane.action(name).is_over


async def test_a_session_can_be_passed_on_before_it_is_ready(plane: Plane):
    plane.faults.start_delay_s = 1
    sbx = await sb.session(name="passed-early")
    passed = pickle.loads(pickle.dumps(sbx))
    assert (passed.endpoint, passed.is_owner) == ("", False)
    async with asyncio.timeout(LONG_S):
        assert (await passed.exec("echo from afar")).stdout == "from afar\n"
        assert passed.ip == plane.pod("passed-early").ip
        await passed.close()
        assert not plane.action("passed-early").is_over
        assert (await sbx.exec("echo still here")).stdout == "still here\n"
    await sbx.close()
    assert plane.action("passed-early").is_over


@pytest.mark.parametrize("stage", ["queued", "initialising", "starting"])
async def test_a_close_during_bring_up_ends_the_run(plane: Plane, stage: str):
    name = f"closed-{stage}"
    if stage == "queued":
        plane.faults.start_delay_s = LONG_S
    elif stage == "initialising":
        plane.faults.pod_delay_s = LONG_S
    sbx = await sb.session(name=name)
    waiting = asyncio.create_task(sbx.open())
    if stage != "queued":
        await until(lambda: plane.action(name).pod is not None)
        # Until the task itself runs, nothing in the pod handles SIGTERM: it gets its whole grace.
        plane.pod(name).manifest["spec"]["terminationGracePeriodSeconds"] = 1
    begun = time.monotonic()
    await sbx.close()
    assert time.monotonic() - begun < SOON_S
    assert phase(plane, name) == "ABORTED"
    with pytest.raises(sb.SandboxError):
        await asyncio.wait_for(waiting, SOON_S)
    assert bool(plane.action(name).pods) == (stage != "queued")
    await until(lambda: not any(p.processes() for p in plane.action(name).pods), within_s=30)
