"""Check for optional dependencies; the error names the extra that installs them."""

from __future__ import annotations

import importlib.util

from union.sandbox.errors import SandboxError

__all__ = ["MissingExtraError", "install_hint", "require"]


class MissingExtraError(SandboxError, ImportError):
    """A package of an extra is not installed; the hint is the command that installs it."""

    code = "missing-extra"


def install_hint(extra: str) -> str:
    """Return the commands that install an extra of this package, which no index has."""
    return f"in a checkout: pip install '.[{extra}]'; with a wheel: pip install 'FILE.whl[{extra}]'"


def require(module: str, *, extra: str, what: str) -> None:
    """Raise `MissingExtraError` unless ``module`` is installed."""
    if importlib.util.find_spec(module) is None:
        raise MissingExtraError(
            f"{what} needs the package {module!r}, which is not installed",
            hint=install_hint(extra),
        )
