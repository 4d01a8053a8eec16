"""Text where bytes are written."""

from __future__ import annotations

from union import sandbox as sb


async def main(sbx: sb.Session) -> None:
    await sbx.put_bytes("a", "text")  # mistake
