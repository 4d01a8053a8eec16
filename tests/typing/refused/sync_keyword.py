"""A misspelled keyword of the synchronous face."""

from union.sandbox import sync


def main() -> None:
    with sync.on_device.session() as sbx:
        sbx.exec("true", timeout=3)  # mistake
