"""The network of a session is a ceiling for its runs; decisions are reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED
from tests.remote.conftest import remote

from union import sandbox as sb

if TYPE_CHECKING:
    from tests.servers import ServerProcess

LIST = {"network_mode": "allowlist", "network_allowlist": ["a.example", "192.0.2.0/24:443"]}
BLOCKED = {"network_mode": "blocked"}
REFUSED = {
    "blocked to open": (BLOCKED, {"network_mode": "open"}),
    "blocked to a list": (BLOCKED, LIST),
    "a list to open": (LIST, {"network_mode": "open"}),
    "another name": (LIST, {"network_allowlist": ["b.example"]}),
    "a wider range": (LIST, {"network_allowlist": ["192.0.0.0/16:443"]}),
    "another port": (LIST, {"network_allowlist": ["192.0.2.1:80"]}),
}
ALLOWED = {
    "no mode to a list": ({}, LIST),
    "no mode to open": ({}, {"network_mode": "open"}),
    "a list to blocked": (LIST, {"network_mode": "blocked"}),
    "open to blocked": ({"network_mode": "open"}, {"network_mode": "blocked"}),
    "open to a list": ({"network_mode": "open"}, LIST),
    "a part of the list": (LIST, {"network_allowlist": ["192.0.2.7:443"]}),
    "the same list": (LIST, LIST),
}


@pytest.mark.threat(122, 172)
@pytest.mark.spec("C9")
@pytest.mark.parametrize("case", REFUSED)
async def test_a_run_cannot_widen_the_network(quick: ServerProcess, case: str):
    opened, asked = REFUSED[case]
    async with remote(quick, **opened) as session:
        with pytest.raises(sb.PolicyError, match="network"):
            await session.run("touch started", **asked)
        assert (await session.exec("ls")).stdout == "", "the command was not started"


@pytest.mark.spec("C9")
@pytest.mark.parametrize("case", ALLOWED)
async def test_a_run_can_narrow_the_network(quick: ServerProcess, case: str):
    opened, asked = ALLOWED[case]
    async with remote(quick, backend=ISOLATED[0], **opened) as session:
        proc = await session.run("readlink /proc/self/ns/net", **asked)
        assert proc.returncode == 0
        assert proc.isolation.egress == "kernel", "a server with a TCP port isolates it"


@pytest.mark.spec("F8", "D2")
async def test_decisions_are_reported(quick: ServerProcess):
    async with remote(quick, backend=ISOLATED[0], **LIST) as session:
        proc = await session.run(
            "import socket; socket.create_connection(('refused.example', 443))",
            script_type="python",
        )
    assert proc.returncode == 1
    decision = proc.network[0]
    assert (decision.host, decision.allowed) == ("refused.example", False)
    assert decision.suggestion.startswith("refused.example")


@pytest.mark.spec("D2", "B9")
async def test_a_run_reports_its_own_isolation(quick: ServerProcess):
    async with remote(quick, backend=ISOLATED[0], network_mode="open") as session:
        closed = await session.run("true", network_mode="blocked")
        opened = await session.run("true")
        assert closed.isolation.backend == opened.isolation.backend == ISOLATED[0]
        assert opened.isolation == session.isolation
