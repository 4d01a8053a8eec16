"""The synchronous face has nothing to await."""

from union.sandbox import sync


async def main() -> None:
    with sync.on_device.session() as sbx:
        await sbx.exec("true")  # mistake
