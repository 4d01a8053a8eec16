"""An argument that is spelled otherwise."""

from __future__ import annotations

from union import sandbox as sb


async def main(sbx: sb.Session) -> None:
    await sbx.run("true", timeout=5)  # mistake
