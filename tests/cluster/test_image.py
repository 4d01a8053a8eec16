"""The image of a sandbox's pod, as the Dockerfile that would be built."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import flyte
import pytest

from union import sandbox as sb
from union.sandbox.cluster._wheel import current_wheel

if TYPE_CHECKING:
    from pathlib import Path


async def dockerfile(
    image: flyte.Image, capfd: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
) -> str:
    from flyte._internal.imagebuild.docker_builder import DockerImageBuilder

    # Otherwise the SDK requires a running Docker.
    patch.setenv("FLYTE_DOCKER_BUILDKIT_BUILDER_NAME", "none")
    await DockerImageBuilder()._build_image(image, push=False, dry_run=True)
    return capfd.readouterr().out


async def wheels_of(image: flyte.Image, context: Path) -> list[Path]:
    """Return the wheels that a builder copies to the files of its build."""
    from flyte._image import PythonWheels
    from flyte._internal.imagebuild.docker_builder import PythonWheelHandler

    for layer in image._layers:
        if isinstance(layer, PythonWheels):
            await PythonWheelHandler.handle(layer, context, "")
    return sorted((context / "dist").iterdir())


@pytest.mark.spec("I6", "P5")
async def test_the_image_installs_this_code_and_no_version_of_an_index(
    capfd, monkeypatch, tmp_path
):
    text = await dockerfile(sb.base_sandbox_image, capfd, monkeypatch)
    assert "bubblewrap" in text
    wheel = current_wheel()
    shipped = await wheels_of(sb.base_sandbox_image, tmp_path)
    assert [path.name for path in shipped] == [wheel.path.name]
    assert shipped[0].read_bytes() == wheel.path.read_bytes()
    installs = [
        line for line in text.splitlines() if re.search(r"unionai[-_]sandbox(?!:)", line)
        and "pip install" in line
    ]  # fmt: skip
    assert len(installs) == 2
    # Nothing but the wheel has this version, so no index can replace it.
    assert all(line.endswith(f"unionai-sandbox=={wheel.version}") for line in installs)
    assert "--no-index" in installs[1]


@pytest.mark.spec("P5")
async def test_the_dependencies_are_those_of_the_package(capfd, monkeypatch):
    text = await dockerfile(sb.base_sandbox_image, capfd, monkeypatch)
    line = next(line for line in text.splitlines() if "pip install" in line)
    for need in ("uv>=", "aiohttp>=", "cryptography>=", "flyte>=", "kubernetes>="):
        assert need in line


@pytest.mark.spec("P5")
async def test_an_image_of_the_caller_gets_the_same_code(capfd, monkeypatch, tmp_path):
    own = flyte.Image.from_debian_base(name="agent").with_apt_packages("git")
    image = sb.image_with_sandbox(own, extras=["remote"])
    text = await dockerfile(image, capfd, monkeypatch)
    assert f"unionai-sandbox=={current_wheel().version}" in text
    assert "git" in text
    assert "kubernetes>=" not in text
    assert [path.name for path in await wheels_of(image, tmp_path)] == [current_wheel().path.name]


@pytest.mark.spec("P5")
def test_the_tag_depends_on_the_code(monkeypatch, tmp_path):
    before = sb.base_sandbox_image.with_pip_packages("numpy").uri
    (tmp_path / "other.whl").write_bytes(b"another")
    other = type("Other", (), {"path": tmp_path / "other.whl", "version": "1"})
    monkeypatch.setattr("union.sandbox.cluster._image.current_wheel", lambda: other)
    assert sb.base_sandbox_image.with_pip_packages("numpy").uri != before


@pytest.mark.spec("P5")
def test_the_image_is_built_for_the_architecture_of_the_launcher():
    machine = current_wheel().source.machine
    platform = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}[machine]
    assert sb.base_sandbox_image.platform == (platform,)


@pytest.mark.spec("P5")
@pytest.mark.parametrize("image", ["debian:12", None])
def test_an_image_that_is_none_of_flytes_is_refused(image):
    with pytest.raises(sb.SandboxUsageError, match=r"image must be a flyte\.Image"):
        sb.image_with_sandbox(image)


@pytest.mark.spec("P5")
@pytest.mark.parametrize("extras", ["remote", ["gpu"], 1])
def test_unknown_extras_are_refused(extras):
    with pytest.raises(sb.SandboxUsageError, match="extras must be a list of deploy, flyte"):
        sb.image_with_sandbox(flyte.Image.from_debian_base(name="a"), extras=extras)


@pytest.mark.spec("P5")
def test_an_image_that_cannot_be_extended_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    image = flyte.Image.from_dockerfile(tmp_path / "Dockerfile", registry="r.example", name="n")
    with pytest.raises(sb.SandboxUsageError, match="a layer cannot be added"):
        sb.image_with_sandbox(image)


@pytest.mark.spec("I6")
def test_the_image_can_be_extended():
    assert isinstance(sb.base_sandbox_image, flyte.Image)
    more = sb.base_sandbox_image.with_pip_packages("numpy")
    assert more.uri != sb.base_sandbox_image.uri
    assert "union-sandbox" in sb.base_sandbox_image.uri
    assert pickle.loads(pickle.dumps(more)).uri == more.uri
    assert "SandboxWheelLayer()" in repr(more)


@pytest.mark.spec("I6")
async def test_the_image_of_a_pod_ends_with_a_numeric_user(capfd, monkeypatch):
    """Kubernetes refuses ``runAsNonRoot`` for an image whose user is a name."""
    image = sb.base_sandbox_image.with_apt_packages("git")
    made = sb.SandboxEnvironment(name="numeric-user", image=image)
    text = await dockerfile(made.image, capfd, monkeypatch)
    users = re.findall(r"^USER (.*)$", text, re.MULTILINE)
    assert users == ["root", "1000:1000"], "packages are installed before"
    assert text.index("git") < text.index("USER 1000")
    assert made.clone_with("numeric-user-2").image == made.image
    foreign = flyte.Image.from_base("registry.example/own:1")
    assert sb.SandboxEnvironment(name="foreign-user", image=foreign).image is foreign


@pytest.mark.spec("P5")
def test_declaring_an_environment_makes_no_wheel():
    program = (
        "from union import sandbox as sb\nfrom union.sandbox.cluster import _wheel\n"
        "sb.SandboxEnvironment(name='lazy')\n"
        "assert _wheel.current_wheel.cache_info().currsize == 0\n"
        "sb.DEFAULT_SANDBOX_ENV.image.uri\n"
        "assert _wheel.current_wheel.cache_info().currsize == 1\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=110)
