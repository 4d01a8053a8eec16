"""Images with exactly the code of this package that the caller runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from union.sandbox._core.optional_deps import require
from union.sandbox.cluster._wheel import DISTRIBUTION, PLATFORMS, current_wheel, find_source
from union.sandbox.errors import SandboxUsageError

require("flyte", extra="flyte", what="base_sandbox_image")

from flyte import Image  # noqa: E402 - only where it is known to be there
from flyte._image import PythonWheels, _DockerLines  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["SandboxWheelLayer", "base_sandbox_image", "image_of_pod", "image_with_sandbox"]

_NAME: Final = "union-sandbox"
_EXTRAS: Final = ("flyte", "remote")
_USER: Final = _DockerLines(("USER 1000:1000",))
"""The user ``flyte`` of Flyte's base images."""


class SandboxWheelLayer(PythonWheels):
    """The layer that installs this package. Its wheel is made when the layer is first read."""

    # The fields of the base class, which are read like attributes by every builder.

    def __init__(self) -> None:
        """Create the layer, without the wheel."""

    @property
    def wheel_dir(self) -> Path:  # made late
        return current_wheel().path.parent

    @property
    def wheel_dir_name(self) -> str:  # made late
        return self.wheel_dir.name

    @property
    def package_name(self) -> str:  # made late
        # The version is one that no index has, so that only the wheel matches.
        return f"{DISTRIBUTION}=={current_wheel().version}"

    def __repr__(self) -> str:
        return "SandboxWheelLayer()"

    def __rich_repr__(self) -> Iterator[Any]:
        return iter(())


def _needs(extras: Sequence[str]) -> list[str]:
    """Return the requirements of this package with these extras."""
    found = set()
    for need in find_source().requirements:
        package, _, marker = need.partition(";")
        marker = marker.replace('"', "'")
        if "extra ==" not in marker or any(f"extra == '{extra}'" in marker for extra in extras):
            found.add(package.strip())
    return sorted(found)


def _check_extras(extras: object) -> tuple[str, ...]:
    accepted = {"deploy", "flyte", "remote"}
    given = () if isinstance(extras, str) or not hasattr(extras, "__iter__") else tuple(extras)
    if isinstance(extras, str) or not hasattr(extras, "__iter__") or not set(given) <= accepted:
        raise SandboxUsageError(
            f"extras must be a list of {', '.join(sorted(accepted))}, not {extras!r}",
            argument="extras",
        )
    return given


def image_with_sandbox(image: Image, *, extras: Sequence[str] = _EXTRAS) -> Image:
    """Add this package to an image of your own: exactly the code that this process runs.

    The code comes from the installed wheel, the checkout or the editable install that is imported
    here, in a wheel that is made when the image is built. The dependencies come from the package
    index. The image is built for the architecture of this machine, because the package contains
    a compiled program.

    Args:
        image: The image to extend, with a name, as ``flyte.Image.from_debian_base()`` has one.
        extras: The extras whose dependencies are installed: ``"remote"``, ``"flyte"``,
            ``"deploy"``. Default: ``"flyte"`` and ``"remote"``, with which a task can call
            ``session()``.

    """
    if not isinstance(image, Image):
        raise SandboxUsageError(
            f"image must be a flyte.Image, not {image!r}",
            argument="image",
            hint="flyte.Image.from_debian_base()",
        )
    needs = _needs(_check_extras(extras))
    machine = find_source().machine
    platform: Any = None if machine is None else (PLATFORMS[machine],)
    try:
        image = image.with_pip_packages(*needs)
        return image.clone(addl_layer=SandboxWheelLayer(), platform=platform)
    except ValueError as exc:
        raise SandboxUsageError(
            f"image: a layer cannot be added to it: {exc}",
            argument="image",
            hint="image.clone(name='my-image', extendable=True) makes one that can be extended",
        ) from exc


def image_of_pod(image: object) -> object:
    """Return the image of a sandbox's pod, with a numeric user if it derives from ours.

    Kubernetes starts a pod with ``runAsNonRoot`` only if the user of its image is a number. The
    user comes last, because layers before it install packages. Flyte's remote builder chooses the
    user itself.
    """
    if not isinstance(image, Image):
        return image
    layers = image._layers  # noqa: SLF001 - the SDK has no public name for it
    is_ours = any(isinstance(layer, SandboxWheelLayer) for layer in layers)
    if not is_ours or layers[-1] == _USER:
        return image
    return image.clone(addl_layer=_USER)


base_sandbox_image: Final[Image] = image_with_sandbox(
    Image.from_debian_base(name=_NAME).with_apt_packages("bubblewrap", "ca-certificates")
)
"""The image of a sandbox's pod: Debian, Python, Flyte, bubblewrap, and exactly the code of this
package that the caller runs. Extend it with ``.with_pip_packages(...)`` and the like."""
