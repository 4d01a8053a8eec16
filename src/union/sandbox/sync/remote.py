"""Sessions on a server, without ``await``: the names of ``union.sandbox.remote``."""

from __future__ import annotations

from union.sandbox import remote
from union.sandbox.sync import _faces

__all__ = _faces.mirror(__name__, remote)  # noqa: PLE0605 - the stub lists them
