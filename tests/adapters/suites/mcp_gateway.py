"""``sandbox-server --mcp``: the tools over streamable HTTP, with the keys of the server."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from served import TOKEN, sandbox_server

BACKEND = os.environ.get("ADAPTER_BACKEND", "userns")
HEADERS = {
    "Content-Type": "application/json",
    "Accept": "application/json, text/event-stream",
}


@pytest.fixture(scope="module")
def served():
    with sandbox_server(BACKEND, "--mcp", "127.0.0.1:0", token=TOKEN) as (endpoint, announced):
        yield endpoint, announced["mcp"]


def post(url, payload, token=TOKEN, **more):
    headers = {**HEADERS, **more}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, json.dumps(payload).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read().decode(), dict(reply.headers)
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode(), dict(exc.headers)


INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}


class Connection:
    """A client without the SDK, whose versions differ; it uses the protocol of 2025-06-18."""

    def __init__(self, url, token=TOKEN):
        self.url, self.token, self.number = url, token, 1
        status, _, headers = post(url, INITIALIZE, token)
        assert status == 200
        found = {name.lower(): value for name, value in headers.items()}
        self.headers = {"Mcp-Session-Id": found["mcp-session-id"]}
        note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        assert post(url, note, token, **self.headers)[0] == 202

    def request(self, method, params):
        self.number += 1
        payload = {"jsonrpc": "2.0", "id": self.number, "method": method, "params": params}
        status, text, _ = post(self.url, payload, self.token, **self.headers)
        assert status == 200, text
        lines = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
        replies = [json.loads(line) for line in lines or [text] if line]
        return next(reply for reply in replies if reply.get("id") == self.number)

    def tool(self, name, **arguments):
        found = self.request("tools/call", {"name": name, "arguments": arguments})
        return found["result"]


def sessions_of(endpoint, token=TOKEN):
    request = urllib.request.Request(
        f"{endpoint}/v1/sessions", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())["sessions"]


def test_requests_without_a_valid_key_are_refused(served):
    _, url = served
    for token in (None, "invalid-token-of-a-stranger", ""):
        status, text, headers = post(url, INITIALIZE, token)
        assert status == 401, text
        assert "bearer" in {k.lower(): v for k, v in headers.items()}["www-authenticate"].lower()


def test_tools_run_in_sessions_of_the_server(served):
    endpoint, url = served
    before = len(sessions_of(endpoint))
    client = Connection(url)
    names = {tool["name"] for tool in client.request("tools/list", {})["result"]["tools"]}
    assert {"run_command", "run_code", "read_file", "write_file", "reset"} <= names
    done = client.tool("run_command", command="pwd; echo kept > /tmp/x; exit 4")
    assert done["structuredContent"]["exit_code"] == 4
    assert done["structuredContent"]["stdout"] == "/workspace\n"
    assert client.tool("run_code", code="6 * 7")["structuredContent"]["text"] == "42"
    assert (
        client.tool("run_command", command="cat /tmp/x")["structuredContent"]["stdout"] == "kept\n"
    )
    assert len(sessions_of(endpoint)) == before + 1
    other = Connection(url)
    again = other.tool("run_command", command="cat /tmp/x")
    assert again["structuredContent"]["stdout"] == "kept\n", "the same key has the same sandboxes"
    client.tool("reset")
    assert len(sessions_of(endpoint)) == before


async def test_checkpoints_over_a_server(served):
    from mcp_tools import connect, value

    options = {"endpoint": served[0], "token": TOKEN, "persist": "workdir"}
    async with connect(is_new=True, **options) as client:
        await value(client, "write_file", path="a", content="one")
        taken = await value(client, "checkpoint", name="first")
        await value(client, "write_file", path="a", content="two")
        found = await value(client, "diff_checkpoint", id=taken["id"])
        await value(client, "rollback", id=taken["id"])
        assert (await value(client, "read_file", path="a"))["text"] == "one"
    assert [(c["action"], c["path"]) for c in found["changes"]] == [("changed", "a")]


def test_a_connection_of_one_key_is_useless_with_another(served):
    _, url = served
    client = Connection(url)
    status, _, _ = post(
        url,
        {"jsonrpc": "2.0", "id": 9, "method": "tools/list", "params": {}},
        "invalid-token-of-a-stranger",
        **client.headers,
    )
    assert status == 401


async def test_a_key_for_one_session_cannot_use_it(served):
    from union.sandbox import remote

    endpoint, url = served
    async with remote.session(endpoint=endpoint, token=TOKEN) as session:
        await session.exec("true")
        request = urllib.request.Request(
            f"{endpoint}/v1/sessions/{session.id}/capability",
            b'{"expires_s": 60}',
            {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
        )
        with await asyncio.to_thread(urllib.request.urlopen, request, timeout=60) as reply:
            token = json.loads(reply.read())["token"]
        status, text, _ = await asyncio.to_thread(post, url, INITIALIZE, token)
    assert status == 403, text


def test_foreign_hosts_and_pages_are_refused(served):
    _, url = served
    assert post(url, INITIALIZE, Host="example.com")[0] in {403, 421}
    assert post(url, INITIALIZE, Origin="http://example.com")[0] == 403


def test_the_policy_of_the_server_applies(served):
    client = Connection(served[1])
    shown = client.tool("run_command", command="cat /proc/net/dev | wc -l", sandbox="other")
    assert shown["structuredContent"]["stdout"].strip() == "3"
    client.tool("reset", sandbox="other")


def test_hosts_are_allowed_by_the_operator_only(served):
    allowed = "allowed.example.com"
    with sandbox_server(BACKEND, "--mcp", "127.0.0.1:0", "--mcp-allow", allowed, token=TOKEN) as (
        _,
        announced,
    ):
        for url, is_open in ((served[1], False), (announced["mcp"], True)):
            tools = Connection(url).request("tools/list", {})["result"]["tools"]
            (found,) = [tool for tool in tools if tool["name"] == "run_command"]
            assert found["annotations"]["openWorldHint"] is is_open
            assert "network" not in json.dumps(found["inputSchema"])


def test_the_endpoint_ends_with_its_server():
    with sandbox_server(BACKEND, "--mcp", "127.0.0.1:0", token=TOKEN) as (_, announced):
        assert Connection(announced["mcp"]).tool("run_command", command="true")
        os.kill(announced["pid"], signal.SIGTERM)
    with pytest.raises(urllib.error.URLError):
        post(announced["mcp"], INITIALIZE)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "nonsense", "unix:/run/x"])
def test_an_address_that_is_not_safe_or_not_valid_is_refused(address):
    done = subprocess.run(
        [sys.executable, "-m", "union.sandbox.server", "--bind", "127.0.0.1:0", "--mcp", address],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "--mcp" in done.stderr
