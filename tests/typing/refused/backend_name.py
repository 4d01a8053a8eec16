"""A backend that does not exist."""

from __future__ import annotations

from union import sandbox as sb


async def main() -> None:
    sb.on_device.session(backend="bwrap")  # mistake
