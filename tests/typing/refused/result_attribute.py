"""An attribute that a result does not have."""

from __future__ import annotations

from union import sandbox as sb


async def main(sbx: sb.Session) -> None:
    print((await sbx.exec("true")).output)  # mistake
