"""A time limit that is text."""

from __future__ import annotations

from union import sandbox as sb


async def main(sbx: sb.Session) -> None:
    await sbx.exec("true", timeout_s="5")  # mistake
