"""Resources as a mapping."""

from __future__ import annotations

from union import sandbox as sb


async def main(sbx: sb.Session) -> None:
    await sbx.exec("true", resources={"memory": "1Gi"})  # mistake
