"""A network mode that does not exist, of a session."""

from __future__ import annotations

from union import sandbox as sb


async def main() -> None:
    sb.on_device.session(network_mode="off")  # mistake
