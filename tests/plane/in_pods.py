"""Sessions in real pods, under this stand-in for a control plane. Opt-in: it needs a cluster.

``make test-pods KUBECONFIG=...``, and three more variables:

- ``SANDBOX_POD_IMAGE``: an image with this package, ``flyte``, GNU tar and a CA bundle, which the
  cluster has or can pull;
- ``SANDBOX_PLANE_HOST``: the address at which pods reach this machine;
- ``SANDBOX_POD_NAMESPACE``: where to make them; ``default`` if not given.

This machine must reach the pods' addresses, so it is a node of the cluster, or routes to it. Not
collected by ``make test``: the file has no name of a test on purpose.
"""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from typing import TYPE_CHECKING

import flyte
import pytest
from tests.plane.client import connected
from tests.plane.plane import Plane
from tests.plane.pods import KubePods, api_from

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(600)
READY_S = 300


@pytest.fixture(scope="module")
def plane() -> Iterator[Plane]:
    wanted = ("KUBECONFIG", "SANDBOX_POD_IMAGE", "SANDBOX_PLANE_HOST")
    missing = [name for name in wanted if not os.environ.get(name)]
    assert not missing, f"needs {', '.join(missing)}"
    pods = KubePods(
        api_from(os.environ["KUBECONFIG"]),
        namespace=os.environ.get("SANDBOX_POD_NAMESPACE", "default"),
    )
    with Plane(host=os.environ["SANDBOX_PLANE_HOST"], pods=pods) as plane, connected(plane):
        yield plane


@pytest.mark.parametrize("mode", ["userns", "bwrap"])
async def test_a_session_runs_in_a_pod_and_ends_with_its_owner(plane: Plane, mode: str):
    environment = sb.SandboxEnvironment(
        name=f"in-pods-{mode}", image=os.environ["SANDBOX_POD_IMAGE"], sandbox_mode=mode
    )
    flyte.deploy(environment.task_env, version="1", copy_style="none")
    async with asyncio.timeout(READY_S):
        opening = await sb.session(environment, timeout=timedelta(minutes=10))
        async with opening as sbx:
            assert (await sbx.exec("echo hello")).stdout == "hello\n"
            assert sbx.ip
            token = "/var/run/secrets/kubernetes.io/serviceaccount/token"
            assert (await sbx.exec(f"test -e {token}")).returncode != 0
        pod = plane.action(sbx.name).pod
        assert pod is not None
        while not pod.is_over:
            await asyncio.sleep(0.5)
    assert plane.action(sbx.name).is_over
