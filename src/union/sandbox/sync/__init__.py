r"""The whole API without ``await``, for plain code, threads, notebooks and code inside a loop.

>>> from union.sandbox import sync
>>> with sync.on_device.session(backend="userns") as sbx:
...     sbx.exec("echo hello").stdout
'hello\n'

Names, arguments and results are those of ``union.sandbox``. One event loop in a background thread
runs all synchronous sessions of the process. Ctrl-C ends the command that the main thread waits
for. Sessions that are still open at interpreter exit are closed.
"""

from __future__ import annotations

import importlib
from typing import Any

from union import sandbox as _sandbox

__all__ = [*(name for name in _sandbox.__all__ if name != "sync"), "wrap"]  # noqa: PLE0604 - strings


def __getattr__(name: str) -> Any:
    # Resolved at first use, as in `union.sandbox`.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from union.sandbox.sync import _faces

    if name in {"on_device", "remote"}:
        value: Any = importlib.import_module(f"{__name__}.{name}")
    elif name == "wrap":
        value = _faces.wrap
    else:
        value = _faces.public(getattr(_sandbox, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
