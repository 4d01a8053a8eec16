"""``sbx serve``: the server, which is an extra."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from union.sandbox.errors import SandboxError

if TYPE_CHECKING:
    import argparse

__all__ = ["serve"]


def serve(options: argparse.Namespace) -> int:
    """Hands every argument to ``sandbox-server``; both are one program."""
    try:
        server = importlib.import_module("union.sandbox.server")
    except ModuleNotFoundError as exc:
        raise SandboxError(
            f"the server needs {exc.name!r}, which is not installed",
            code="missing-extra",
            hint="pip install 'unionai-sandbox[remote]'",
        ) from exc
    sys.argv = ["sbx serve", *options.command]
    return int(server.main())
