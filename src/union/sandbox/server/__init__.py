"""``sandbox-server``: sessions for clients on other machines; the same engine, behind a wire."""

from __future__ import annotations

__all__ = ["main"]


def main() -> int:
    """Runs the server until it is told to end; the console script ``sandbox-server``."""
    import gc
    import sys

    from union.sandbox._core.optional_deps import MissingExtraError, require

    try:
        require("aiohttp", extra="remote", what="sandbox-server")
    except MissingExtraError as exc:
        sys.stderr.write(f"sandbox-server: {exc}\n")
        return 2
    # What modules make stays: to look for garbage among it costs time, and finds nothing.
    gc.disable()
    from union.sandbox.server._main import main as run

    return run()
