"""Text as input."""

from __future__ import annotations

from union import sandbox as sb


async def main(sbx: sb.Session) -> None:
    await sbx.exec("cat", stdin="text")  # mistake
