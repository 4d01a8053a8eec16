"""A host program to be killed: local and remote sessions, network, control groups, commands.

It prints one line when everything is running, and continues until it is killed.
"""

from __future__ import annotations

import asyncio
import sys

from union import sandbox as sb


async def main(endpoint: str, token: str, port: int) -> None:
    """Keep commands running, locally and on the server, until the process is killed."""
    local = sb.on_device.session(
        backend="userns",
        network_mode="allowlist",
        network_allowlist=[f"127.0.0.1:{port}"],
        resources=sb.Resources(memory="256Mi"),
    )
    wrapped = sb.on_device.session(backend="bubblewrap")
    remote = sb.remote.session(endpoint=endpoint, token=token, connect_timeout_s=2)
    async with local, wrapped, remote:
        for session in (local, wrapped, remote):
            await session.run("sleep 60 & setsid sleep 60 & wait", background=True)
        print("ready", flush=True)
        for _ in range(10_000):
            await asyncio.gather(
                local.exec("true"), wrapped.exec("true"), remote.exec("true"), local.run_code("1")
            )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
