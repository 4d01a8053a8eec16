"""The content of a file without await."""

from __future__ import annotations

from union import sandbox as sb


async def main(sbx: sb.Session) -> None:
    print(sbx.get_bytes("a").decode())  # mistake
