"""The image of a sandbox's pod, as the Dockerfile that would be built."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

import flyte
import pytest

from union import sandbox as sb
from union.sandbox.cluster._image import image_with

if TYPE_CHECKING:
    from pathlib import Path

VERSION = metadata.version("unionai-sandbox")


async def dockerfile(
    image: flyte.Image, capfd: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
) -> str:
    from flyte._internal.imagebuild.docker_builder import DockerImageBuilder

    # Otherwise the SDK requires a running Docker.
    patch.setenv("FLYTE_DOCKER_BUILDKIT_BUILDER_NAME", "none")
    await DockerImageBuilder()._build_image(image, push=False, dry_run=True)
    return capfd.readouterr().out


@pytest.mark.spec("I6")
async def test_a_release_is_pinned(capfd, monkeypatch):
    text = await dockerfile(image_with(None), capfd, monkeypatch)
    assert "bubblewrap" in text
    assert f"unionai-sandbox[flyte,remote]=={VERSION}" in text


@pytest.mark.spec("I6")
async def test_a_local_wheel_is_installed(capfd, monkeypatch, tmp_path: Path):
    wheels = tmp_path / "dist"
    wheels.mkdir()
    (wheels / f"unionai_sandbox-{VERSION}-py3-none-any.whl").write_bytes(b"a wheel")
    image = image_with(wheels)
    text = await dockerfile(image, capfd, monkeypatch)
    assert "unionai-sandbox" in text
    assert "aiohttp" in text
    assert "cryptography" in text
    assert "flyte" in text
    assert "==" + VERSION not in text
    # The tag depends on the content of the wheel.
    (wheels / f"unionai_sandbox-{VERSION}-py3-none-any.whl").write_bytes(b"another")
    assert image_with(wheels).uri != image.uri


@pytest.mark.spec("I6")
def test_the_image_can_be_extended():
    assert isinstance(sb.base_sandbox_image, flyte.Image)
    more = sb.base_sandbox_image.with_pip_packages("numpy")
    assert more.uri != sb.base_sandbox_image.uri
    assert "union-sandbox" in sb.base_sandbox_image.uri
