"""The wheel in an image holds exactly the code of the caller, however that was installed."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.wheels import code_of, contents, made_by_a_caller
from tests.environments.places import missing
from tests.environments.suite import BUILD_LIMIT_S, user_venv

from union.sandbox.cluster import _wheel
from union.sandbox.errors import SandboxExecutionError

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = "union/sandbox/_linux/bin/sandbox-launcher"


def imported_files(root: Path) -> dict[str, bytes]:
    """Return the files of a package directory, but for those that Python itself writes."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted((root / "union/sandbox").rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def editable(tmp_path_factory) -> _wheel.Wheel:
    """The wheel of this process, in which the package is installed as editable."""
    return _wheel.write_wheel(_wheel.find_source(), tmp_path_factory.mktemp("editable"))


def installed(wheel: Path, target: Path) -> Path:
    done = subprocess.run(
        ["uv", "pip", "install", "--quiet", "--offline", "--no-index", "--no-deps",
         "--target", target, wheel],
        check=False, capture_output=True, text=True, timeout=110,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.spec("P5")
def test_an_editable_install_gives_the_files_that_are_imported(editable):
    assert editable.source.kind == "editable"
    assert editable.source.root == ROOT / "src"
    assert code_of(editable.path) == imported_files(ROOT / "src")
    assert LAUNCHER in code_of(editable.path)


@pytest.mark.spec("P5")
def test_a_checkout_gives_its_own_files_and_not_those_that_are_installed(editable, tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "src", checkout / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    kind, root, wheel = made_by_a_caller(tmp_path / "same", path=checkout / "src")
    assert (kind, root) == ("checkout", str(checkout / "src"))
    # The same code from another place gives the same wheel, and so the same image.
    assert wheel.read_bytes() == editable.path.read_bytes()

    (checkout / "src/union/sandbox/_version.py").write_text('__version__ = "0.1.0"  # changed\n')
    _, _, changed = made_by_a_caller(tmp_path / "changed", path=checkout / "src")
    assert changed.name != wheel.name, "the version depends on the content"
    assert b"# changed" in contents(changed)["union/sandbox/_version.py"]


@pytest.mark.spec("P5")
def test_an_installed_wheel_is_made_again_from_its_record(editable, tmp_path):
    site = installed(editable.path, tmp_path / "site")
    # Not recorded, so no part of the installed package.
    (site / "union/sandbox/left_over.py").write_text("")
    (site / "union/another").mkdir()
    (site / "union/another/__init__.py").write_text("")
    kind, root, wheel = made_by_a_caller(tmp_path / "wheel", path=site)
    assert (kind, root) == ("installed", str(site))
    assert wheel.read_bytes() == editable.path.read_bytes()
    assert wheel.name == editable.path.name, "a second digest is not added to the version"

    # The code that runs counts, also where it was edited after the installation.
    (site / "union/sandbox/py.typed").write_text("edited")
    _, _, edited = made_by_a_caller(tmp_path / "edited", path=site)
    assert contents(edited)["union/sandbox/py.typed"] == b"edited"


@pytest.mark.spec("P5")
def test_the_image_installs_the_wheel_and_gets_the_files_of_the_caller(editable, tmp_path):
    site = installed(editable.path, tmp_path / "site")
    found = {
        name: data
        for name, data in imported_files(site).items()
        if name.startswith("union/sandbox/")
    }
    assert found == imported_files(ROOT / "src")
    assert os.access(site / LAUNCHER, os.X_OK)
    done = subprocess.run([site / "bin/sbx", "version"], check=False, capture_output=True,
                          text=True, timeout=30, env={"PYTHONPATH": str(site)})  # fmt: skip
    assert (done.returncode, done.stdout != "") == (0, True), done.stderr


@pytest.mark.spec("P5")
@pytest.mark.timeout(BUILD_LIMIT_S)
def test_the_published_wheel_gives_the_files_that_it_installs(tmp_path):
    """The wheel of the build back end, in a virtualenv as users have it."""
    if (reason := missing("pod-user")) is not None:
        pytest.skip(reason)
    (site,) = user_venv().glob("lib/python3*/site-packages")
    kind, root, wheel = made_by_a_caller(tmp_path / "wheel", path=site)
    assert (kind, root) == ("installed", str(site))
    assert code_of(wheel) == imported_files(site)
    assert set(code_of(wheel)) == set(imported_files(ROOT / "src"))


@pytest.mark.spec("P5")
def test_an_incomplete_installation_is_refused(editable, tmp_path):
    site = installed(editable.path, tmp_path / "site")
    (site / "union/sandbox/_files/listing.py").unlink()
    with pytest.raises(AssertionError, match=r"_files/listing\.py of its RECORD is missing"):
        made_by_a_caller(tmp_path / "wheel", path=site)


@pytest.mark.spec("P5")
def test_the_same_code_gives_the_same_bytes(editable, tmp_path):
    again = _wheel.write_wheel(_wheel.find_source(), tmp_path)
    assert again.path.name == editable.path.name
    assert again.path.read_bytes() == editable.path.read_bytes()
    assert again.sha256 == editable.sha256


@pytest.mark.spec("P5")
def test_no_index_can_have_the_version(editable):
    public, _, local = editable.version.partition("+")
    assert public == _wheel.find_source().version
    assert local.startswith("code")
    about = contents(editable.path)[f"unionai_sandbox-{editable.version}.dist-info/METADATA"]
    assert f"Version: {editable.version}\n".encode() in about
    assert b"Requires-Dist: uv>=0.5\n" in about


@pytest.mark.spec("P5")
def test_without_a_launcher_the_error_names_the_remedy(tmp_path):
    without = dataclasses.replace(_wheel.find_source(), root=tmp_path)
    assert without.machine is None
    with pytest.raises(SandboxExecutionError, match="needs the launcher for Linux") as caught:
        _wheel.write_wheel(without, tmp_path)
    assert "UNION_SANDBOX_SKIP_NATIVE" in str(caught.value)
    (tmp_path / LAUNCHER).parent.mkdir(parents=True)
    (tmp_path / LAUNCHER).write_bytes(b"#!/bin/sh\n")
    assert without.machine is None, "not a program for Linux"


@pytest.mark.spec("P5")
def test_a_package_of_unknown_origin_is_refused(tmp_path):
    with pytest.raises(SandboxExecutionError, match="neither installed nor part of a checkout"):
        _wheel._from_tree(tmp_path / "src", "checkout")


def test_the_wheel_of_a_process_is_removed_at_its_end():
    program = (
        "from union.sandbox.cluster._wheel import current_wheel\n"
        "print(current_wheel().path)\nassert current_wheel().path.exists()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.strip().endswith(".whl")
    assert not Path(done.stdout.strip()).parent.exists()
