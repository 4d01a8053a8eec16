"""Variables as a list."""

from __future__ import annotations

from union import sandbox as sb


async def main(sbx: sb.Session) -> None:
    await sbx.exec("true", env=["A=b"])  # mistake
