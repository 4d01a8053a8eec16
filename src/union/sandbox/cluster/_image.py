"""The image of a sandbox's pod: Flyte's Debian base, bubblewrap, and this package."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from union.sandbox._core.optional_deps import require

require("flyte", extra="flyte", what="base_sandbox_image")

from flyte import Image  # noqa: E402 - only where it is known to be there

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["base_sandbox_image", "image_with"]

_DISTRIBUTION: Final = "unionai-sandbox"
_EXTRAS: Final = "flyte,remote"
_NAME: Final = "union-sandbox"


def _checkout() -> Path | None:
    """Return the directory this package was installed from, if not from an index."""
    text = metadata.distribution(_DISTRIBUTION).read_text("direct_url.json")
    url = urlsplit(json.loads(text).get("url", "")) if text else None
    if url is None or url.scheme != "file":
        return None
    path = Path(unquote(url.path))
    return path if path.is_dir() else path.parent


def _wheels() -> Path | None:
    """Return the directory with a wheel of exactly this version (``make dist``), if any."""
    place = _checkout()
    version = metadata.version(_DISTRIBUTION)
    for folder in () if place is None else (place / "dist", place):
        if any(folder.glob(f"unionai_sandbox-{version}-*.whl")):
            return folder
    return None


def _needs(extras: Sequence[str]) -> list[str]:
    """Return the requirements of these extras."""
    found = []
    for need in metadata.requires(_DISTRIBUTION) or []:
        package, _, marker = need.partition(";")
        if any(f"extra == '{extra}'" in marker.replace('"', "'") for extra in extras):
            found.append(package.strip())
    return sorted(set(found))


def image_with(wheels: Path | None) -> Image:
    """Return the image, with this package from a directory of wheels or from the index."""
    image = Image.from_debian_base(name=_NAME).with_apt_packages("bubblewrap", "ca-certificates")
    if wheels is None:
        version = metadata.version(_DISTRIBUTION)
        return image.with_pip_packages(f"{_DISTRIBUTION}[{_EXTRAS}]=={version}")
    from flyte._image import PythonWheels

    image = image.with_pip_packages(*_needs(_EXTRAS.split(",")))
    return image.clone(addl_layer=PythonWheels(wheel_dir=wheels, package_name=_DISTRIBUTION))


base_sandbox_image: Final[Image] = image_with(_wheels())
"""The image of a sandbox's pod; extend it with ``.with_pip_packages(...)`` and the like."""
