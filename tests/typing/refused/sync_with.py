"""A block without async."""

from __future__ import annotations

from union import sandbox as sb


async def main() -> None:
    with sb.on_device.session() as sbx:  # mistake
        print()
