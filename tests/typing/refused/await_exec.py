"""The result of exec() is used without await."""

from __future__ import annotations

from union import sandbox as sb


async def main(sbx: sb.Session) -> None:
    print(sbx.exec("true").stdout)  # mistake
