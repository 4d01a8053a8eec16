"""Install packages from a lock file with hashes: exactly the resolved files, or nothing.

    python examples/locked_packages.py [--backend userns] [REQUIREMENT ...]
    python examples/locked_packages.py --index-url http://HOST:PORT/simple --allow HOST:PORT

``uv pip compile`` resolves the requirements and writes the lock file, ``uv pip sync`` installs
exactly its contents into the session's environment. Only these two calls have network access, and
only to the hosts of the package index: ``sb.PYPI_HOSTS``, unless another index is given. A lock
file with a wrong hash is refused. The installed code has no network access.

Prints::

    locked: six==1... with ... hashes
    installed: six==1...
    found: six 1... in the session's environment
    changed hash: refused, Hash mismatch for `six==1...`
    network of the installed code: blocked
    lock: ... lines
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from typing import Any

from union import sandbox as sb

REQUIREMENTS = ["six>=1.16,<2"]
TIMEOUT_S = 120.0

LOOK = """\
import importlib.metadata as metadata, sys
found = metadata.distribution(sys.argv[1])
inside = str(found.locate_file("")).startswith(sys.prefix)
print(sys.argv[1], found.version, "in the session's environment" if inside else "ELSEWHERE")
"""
CONNECT = "import socket; socket.create_connection(('192.0.2.1', 443), 3)"


class Index:
    """A package index, and the calls that may reach it."""

    def __init__(self, sbx: sb.Session, url: str, allow: list[str]) -> None:
        self._sbx = sbx
        self._options = ["--index-url", url] if url else []
        # For calls that download, and no others.
        self._network: dict[str, Any] = {
            "network_mode": "allowlist",
            "network_allowlist": allow or sb.PYPI_HOSTS,
        }

    async def uv(self, *arguments: str) -> sb.ExecResult:
        """Run ``uv pip ...`` with access to the index; show its output on a terminal."""
        if sys.stderr.isatty():
            print(f"\x1b[2muv pip {' '.join(arguments)} ...\x1b[0m", file=sys.stderr)
        return await self._sbx.exec(
            ["uv", "pip", *arguments, *self._options], timeout_s=TIMEOUT_S, **self._network
        )

    async def lock(self, requirements: list[str]) -> str:
        """Resolve the requirements, with the hashes of all matching files."""
        await self._sbx.put_bytes("requirements.in", "\n".join(requirements).encode())
        done = await self.uv(
            "compile", "--generate-hashes", "--no-header", "--no-annotate", "--quiet",
            "requirements.in", "--output-file", "requirements.lock",
        )  # fmt: skip
        if not done.ok:
            raise SystemExit(f"the requirements could not be locked:\n{done.stderr}")
        # Keep the lock file under version control, next to the program.
        return (await self._sbx.get_bytes("requirements.lock", max_bytes=1_000_000)).decode()

    async def install(self, lock: str) -> sb.ExecResult:
        """Install the packages of the lock file and remove all others."""
        await self._sbx.put_bytes("install.lock", lock.encode())
        return await self.uv("sync", "--require-hashes", "--reinstall", "install.lock")


def changed(lock: str) -> str:
    """Return the lock file with wrong hashes, as if every file had changed."""
    return re.sub(r"sha256:[0-9a-f]{64}", f"sha256:{'0' * 64}", lock)


async def main(requirements: list[str], url: str, allow: list[str], backend: str) -> None:
    """Lock, install and inspect the packages, and try two operations that must fail."""
    async with sb.on_device.session(backend=backend) as sbx:
        index = Index(sbx, url, allow)
        lock = await index.lock(requirements)
        pinned = re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE)
        names = " ".join(f"{name}=={version}" for name, version in pinned)
        print(f"locked: {names} with {lock.count('--hash=')} hashes")

        installed = await index.install(lock)
        if not installed.ok:
            raise SystemExit(f"the lock could not be installed:\n{installed.stderr}")
        print("installed:", *re.findall(r"^ [+~] (\S+)$", installed.stderr, re.MULTILINE))

        # From here on there is no network: installed code is untrusted.
        await sbx.put_bytes("look.py", LOOK.encode())
        looked = await sbx.exec(["python3", "look.py", pinned[0][0]], check=True)
        print(f"found: {looked.stdout}", end="")

        refused = await index.install(changed(lock))
        why = re.search(r"Hash mismatch for \S+", refused.stderr)
        print("changed hash:", "INSTALLED" if refused.ok else f"refused, {why[0] if why else ''}")

        tried = await sbx.exec(CONNECT, script_type="python")
        print("network of the installed code:", "OPEN" if tried.ok else "blocked")
        print(f"lock: {len(lock.splitlines())} lines")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Packages by a lock with hashes.")
    parser.add_argument("--backend", default="userns", help="isolation backend (default: userns)")
    parser.add_argument("--index-url", default="", help="another package index")
    parser.add_argument("--allow", action="append", default=[], help="a host of that index")
    parser.add_argument("requirement", nargs="*", help=f"default: {REQUIREMENTS[0]}")
    args = parser.parse_args()
    wanted = args.requirement or REQUIREMENTS
    asyncio.run(main(wanted, args.index_url, args.allow, args.backend))
