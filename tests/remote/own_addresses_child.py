"""Runs in its own network namespace: a server, a session and addresses that are added."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

from tests.servers import ServerProcess

from union import sandbox as sb

DIAL = """
import json, sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
found = {}
for host in HOSTS:
    try:
        found[host] = opener.open(f"http://{host}:PORT/v1/health", timeout=10).status
    except Exception as exc:
        found[host] = type(exc).__name__
print(json.dumps(found))
"""
HOSTS = ["203.0.113.10", "203.0.113.77", "198.51.100.7", "[2001:db8:7::9]"]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def program(server: ServerProcess) -> str:
    return DIAL.replace("HOSTS", repr(HOSTS)).replace("PORT", str(server.address[1]))


async def main(backend: str) -> None:
    ip("link", "set", "lo", "up")
    ip("addr", "add", "203.0.113.10/24", "dev", "lo")
    ip("-6", "route", "add", "local", "2001:db8:7::/64", "dev", "lo")
    seen = {}
    options = ("--backend", backend)
    with ServerProcess(*options, bind="[::]:0") as own, ServerProcess(bind="[::]:0") as other:
        own.endpoints[0] = f"http://127.0.0.1:{own.address[1]}"
        async with sb.remote.session(
            endpoint=own.endpoint, token=own.token, network_mode="open", backend=backend
        ) as session:
            for when in ("before", "after"):
                for server in (own, other):
                    code = DIAL.replace("HOSTS", repr(HOSTS)).replace(
                        "PORT", str(server.address[1])
                    )
                    found = json.loads(await session.run_code(code))
                    seen[f"{when} {'own' if server is own else 'other'}"] = found
                if when == "before":
                    ip("addr", "add", "198.51.100.7/32", "dev", "lo")
            proc = await session.run(program(own), script_type="python")
            seen["rules"] = sorted({d.rule for d in proc.network if not d.allowed})
    print(json.dumps(seen))


asyncio.run(main(sys.argv[1]))
