"""Sessions on this machine, without ``await``: the names of ``union.sandbox.on_device``."""

from __future__ import annotations

from union.sandbox import on_device
from union.sandbox.sync import _faces

__all__ = _faces.mirror(__name__, on_device)  # noqa: PLE0605 - the stub lists them
