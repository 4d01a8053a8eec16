"""Root of a pod with a user namespace of its own (`hostUsers: false`)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.environments import matrix, pod
from tests.environments.places import missing, open_pod
from tests.environments.suite import BUILD_LIMIT_S, user_venv

ATTACK = """\
import asyncio, json, os
from union import sandbox as sb

async def main():
    with open("/home/user/secret", "w") as file:
        file.write("secret")
    os.chmod("/home/user/secret", 0o600)
    found = {}
    for name in ("first", "second"):
        async with sb.on_device.session(
            backend="userns", read_only_paths=["/home/user"], network_mode="blocked"
        ) as sbx:
            inside = await sbx.exec("cat /home/user/secret; echo $?; cat /proc/self/uid_map")
            await sbx.exec("echo mine > kept")
            owner = os.stat(f"{sbx.work_dir}/kept").st_uid
            found[name] = {
                "ids": sbx.isolation.ids,
                "stdout": inside.stdout.split(),
                "owner": owner,
                "read back": (await sbx.get_bytes("kept")).decode(),
            }
    try:
        async with sb.on_device.session(backend="userns", strict=True) as sbx:
            found["strict"] = sbx.isolation.ids
    except sb.SandboxError as error:
        found["strict"] = [str(error.args[0]), error.hint]
    print(json.dumps(found))

asyncio.run(main())
"""


def opened(shape: pod.Pod) -> dict[str, Any]:
    if (reason := missing("pod-root")) is not None:
        pytest.skip(reason)
    venv = user_venv()
    env = {"PATH": f"{venv / 'bin'}:/usr/bin:/bin", "VIRTUAL_ENV": str(venv)}
    with open_pod("own-ids", shape, readable=[venv]) as place:
        done = place.run([str(venv / "bin/python"), "-c", ATTACK], env=env, timeout_s=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def shape(**options: Any) -> pod.Pod:
    return pod.Pod(
        uid=0,
        capabilities=pod.DEFAULT_CAPABILITIES,
        masked_proc=False,
        first_id=matrix.OWN_IDS,
        **options,
    )


@pytest.mark.spec("G1")
@pytest.mark.threat(143)
@pytest.mark.timeout(90 + BUILD_LIMIT_S)
def test_each_session_has_an_id_of_the_container_that_owns_nothing() -> None:
    found = opened(shape())
    owners = set()
    for name in ("first", "second"):
        session = found[name]
        assert session["ids"] == "unprivileged"
        assert session["stdout"][0] == "1", "root's own file was read"
        assert session["read back"] == "mine\n"
        assert 30_000 <= session["owner"] < 60_000, "an id that the container has"
        owners.add(session["owner"])
    assert found["strict"] == "unprivileged"


@pytest.mark.spec("G1")
@pytest.mark.timeout(90 + BUILD_LIMIT_S)
def test_a_container_with_few_ids_uses_root_s_own_and_strict_names_the_cause() -> None:
    found = opened(shape(ids=1000))
    assert found["first"]["ids"] == "caller"
    message, hint = found["strict"]
    assert "an id of its own" in message
    assert "65536" in hint
