"""``sandbox-server``: sessions for clients on other machines, over HTTP."""

from __future__ import annotations

__all__ = ["main"]


def main() -> int:
    """Run the server until a signal or a request ends it; the console script ``sandbox-server``."""
    import gc
    import sys

    from union.sandbox._core.optional_deps import MissingExtraError, require

    try:
        require("aiohttp", extra="remote", what="sandbox-server")
    except MissingExtraError as exc:
        sys.stderr.write(f"sandbox-server: {exc}\n")
        return 2
    # Objects created by imports live as long as the process, so collecting among them is wasted.
    gc.disable()
    from union.sandbox.server._main import main as run

    return run()
