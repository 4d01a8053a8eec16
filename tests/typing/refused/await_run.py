"""A call of run() without await."""

from __future__ import annotations

from union import sandbox as sb


async def main(sbx: sb.Session) -> None:
    sbx.run("true")  # mistake
