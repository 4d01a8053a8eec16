"""A network mode that does not exist."""

from __future__ import annotations

from union import sandbox as sb


async def main(sbx: sb.Session) -> None:
    await sbx.run("true", network_mode="allow-list")  # mistake
