"""The operating system that this process runs on; the only module that asks.

The Linux engine uses calls that no other system has. Everywhere else the portable engine is used:
`none` on any POSIX system, and `sandbox-exec` on macOS.
"""

from __future__ import annotations

import sys

__all__ = ["IS_LINUX", "IS_MACOS", "NAME"]

IS_LINUX: bool = sys.platform == "linux"
IS_MACOS: bool = sys.platform == "darwin"

NAME: str = {"linux": "Linux", "darwin": "macOS"}.get(sys.platform, sys.platform)
"""The name of the system in messages."""
