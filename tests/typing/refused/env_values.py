"""A variable that is not text."""

from __future__ import annotations

from union import sandbox as sb


async def main(sbx: sb.Session) -> None:
    await sbx.exec("true", env={"A": 1})  # mistake
