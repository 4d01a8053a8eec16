"""A path that is a number."""

from __future__ import annotations

from union import sandbox as sb


async def main(sbx: sb.Session) -> None:
    await sbx.exec("true", read_only_paths=[3])  # mistake
