"""``sandbox-server``: sessions for clients on other machines; the same engine, behind a wire."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["main"]

_AUTHORITIES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""Where OpenSSL looks for them."""


def main() -> int:
    """Runs the server until it is told to end; the console script ``sandbox-server``."""
    import gc
    import importlib
    import sys

    from union.sandbox._core.extras import MissingExtraError, require

    try:
        require("aiohttp", extra="remote", what="sandbox-server")
    except MissingExtraError as exc:
        sys.stderr.write(f"sandbox-server: {exc}\n")
        return 2
    # What modules make stays: to look for garbage among it costs time, now and ever after.
    gc.disable()
    with _no_authorities():
        importlib.import_module("aiohttp")
    from union.sandbox.server._main import main as run

    gc.freeze()
    gc.enable()
    return run()


@contextlib.contextmanager
def _no_authorities() -> Iterator[None]:
    """While the HTTP library is imported: it reads all certificate authorities, twice.

    They are for its client, which a server does not have: one that was made all the same would
    trust nobody. This is the server's own process, and it has no thread yet.
    """
    before = {name: os.environ.get(name) for name in _AUTHORITIES}
    os.environ.update(dict.fromkeys(_AUTHORITIES, os.devnull))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
