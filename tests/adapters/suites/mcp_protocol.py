"""The MCP project's own tools: the Inspector over stdio, the conformance scenarios over HTTP.

The other scenarios of the suite need the tools, prompts and resources of its example server.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from served import sandbox_server

BACKEND = os.environ.get("ADAPTER_BACKEND", "userns")
NODE = Path(os.environ["ADAPTER_NPM"]) / "node_modules" / ".bin"
ENV = {**os.environ, "PATH": f"{NODE}:{os.environ['PATH']}"}
# The package is on the path of this Python, without its console scripts.
CALL_SBX = "import sys; from union.sandbox._cli.main import main; sys.exit(main())"
SBX = [sys.executable, "-c", CALL_SBX, "mcp", "--backend", BACKEND]
SCENARIOS = (
    *("server-initialize", "ping", "tools-list", "resources-list", "prompts-list"),
    "dns-rebinding-protection",
)


def run(*command):
    done = subprocess.run(
        [str(part) for part in command],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=ENV,
    )
    return done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


def inspect(*arguments):
    # Its default, 15 s, is too short on a busy machine: the SDK's import alone takes seconds then.
    patience = ("--connect-timeout", "60000")
    out, log = run(NODE / "mcp-inspector", "--cli", *SBX, *patience, *arguments)
    assert out.lstrip().startswith("{"), log
    return json.loads(out)


def test_the_inspector_lists_the_tools():
    tools = {tool["name"]: tool for tool in inspect("--method", "tools/list")["tools"]}
    assert {"run_command", "run_code", "read_file", "reset"} <= set(tools)
    assert tools["run_command"]["annotations"]["openWorldHint"] is False


def test_the_inspector_calls_a_tool():
    command = "command=echo hi; exit 4"
    done = inspect("--method", "tools/call", "--tool-name", "run_command", "--tool-arg", command)
    assert done["structuredContent"]["exit_code"] == 4
    assert done["structuredContent"]["stdout"] == "hi\n"


def test_the_inspector_lists_the_resource_of_files():
    done = inspect("--method", "resources/templates/list")
    assert [found["uriTemplate"].partition("{")[0] for found in done["resourceTemplates"]] == [
        "sandbox://files/"
    ]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def own_server():
    port = free_port()
    process = subprocess.Popen([*SBX, "--http", str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def gateway():
    with sandbox_server(BACKEND, "--mcp", "127.0.0.1:0") as (_, announced):
        yield announced["mcp"]


@pytest.fixture(scope="module", params=[own_server, gateway], ids=["sbx", "sandbox-server"])
def url(request):
    with request.param() as found:
        yield found


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_conformance_scenario_passes(url, scenario):
    _, log = run(NODE / "conformance", "server", "--url", url, "--scenario", scenario)
    counts = re.search(r"Passed: (\d+)/(\d+), 0 failed", log)
    assert counts and counts[1] == counts[2] != "0", log
