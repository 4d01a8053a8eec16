"""An argument that run() does not have."""

from __future__ import annotations

from union import sandbox as sb


async def main(sbx: sb.Session) -> None:
    await sbx.run("true", check=True)  # mistake
