"""A backend that a server does not have."""

from __future__ import annotations

from union import sandbox as sb


async def main() -> None:
    sb.remote.session(endpoint="http://h:1", backend="docker")  # mistake
