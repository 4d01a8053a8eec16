"""The project as its users have it: a wheel in a virtualenv that everybody can read.

The Python that runs the tests may live in a home directory closed to other users, so the
virtualenv is made from the system's Python. It is kept between runs and refreshed only when what
goes into it has changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROJECT = Path(__file__).resolve().parents[2]
SYSTEM_PYTHON = Path("/usr/bin/python3")
UV = (sys.executable, "-m", "uv")
"""A third of the processor time of pip and venv."""
OLDEST_PYTHON = (3, 11)
TEST_PACKAGES = (
    *("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "trio"),
    "cryptography",  # of an extra: connections that the host reads have a certificate of its own
)
SUITES = ("tests/contract", "tests/escape", "tests/posture")
"""What is repeated in other places."""
COMPILED = ("-p", "no:cacheprovider", *SUITES)
BUILD_LIMIT_S = 300.0
# Not part of what a wheel is built from; copying or hashing them would only cost time.
NOT_SOURCE = (".*", "__pycache__", "*.egg-info", "*.pyc", "build", "dist", "tests", "bench", "docs")


class SuiteError(Exception):
    """The project could not be installed for other users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """An installed project and a copy of its tests, both readable by every user."""

    venv: Path
    root: Path

    @property
    def python(self) -> str:
        """The interpreter that has the project and the test packages."""
        return str(self.venv / "bin" / "python")

    @property
    def readable(self) -> tuple[Path, Path]:
        """The directories that a place has to hold."""
        return (self.venv, self.root)

    def environment(self) -> dict[str, str]:
        """Return variables that put the virtualenv first and keep the copy of the tests clean."""
        system = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        return {
            "PATH": f"{self.venv / 'bin'}:{system}",
            "VIRTUAL_ENV": str(self.venv),
            "PYTHONDONTWRITEBYTECODE": "1",
        }


@contextmanager
def staged_suite(*, project: Path = PROJECT, cache: Path | None = None) -> Iterator[Suite]:
    """Install the project if needed, copy its tests, and remove the copy at the end."""
    venv = user_venv(project, cache=cache)
    root = Path(tempfile.mkdtemp(prefix="sbx-suite-"))
    try:
        copy_tests(project, root)
        suite = Suite(venv=venv, root=root)
        compile_tests(suite)
        yield suite
    finally:
        shutil.rmtree(root)


def copy_tests(project: Path, root: Path) -> None:
    """Copy the tests and pytest's settings; leave out the sources, so that the wheel is tested."""
    shutil.copytree(
        project / "tests",
        root / "tests",
        ignore=shutil.ignore_patterns("__pycache__", "environments", ".*"),
    )
    for name in ("pyproject.toml", "conftest.py"):
        if (project / name).exists():
            shutil.copy(project / name, root / name)
    open_to_all(root)


def compile_tests(suite: Suite) -> None:
    """Once for all: in a place every worker would do it anew, and none could keep it."""
    # Not in our own environment, which may say that nothing compiled is to be written.
    path = {"PATH": os.environ["PATH"]}
    command = [suite.python, "-m", "pytest", "--collect-only", "-qq", *COMPILED]
    _step(command, cwd=suite.root, env=path)
    open_to_all(suite.root)


def open_to_all(root: Path) -> None:
    """Let everybody read `root` and all below it."""
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode & 0o7777
            runnable = path.is_dir() or mode & 0o100
            path.chmod(mode | (0o055 if runnable else 0o044))


def user_venv(project: Path = PROJECT, *, cache: Path | None = None) -> Path:
    """Return a virtualenv with the project's wheel and the test packages, made if it is stale."""
    home = cache or cache_directory(project)
    home.mkdir(parents=True, exist_ok=True)
    if home.stat().st_uid != os.geteuid():
        message = f"{home} belongs to another user; remove it and try again"
        raise SuiteError(message)
    home.chmod(0o755)
    (home / ".gitignore").write_text("*\n")
    venv = home / "user-venv"
    with (home / "user-venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once must not build over each other
        _refresh(project, venv)
    return venv


def first_closed(path: Path) -> Path | None:
    """Return the first directory on the way to `path` that other users may not pass."""
    for step in (*reversed(path.resolve().parents), path.resolve()):
        if not step.stat().st_mode & 0o001:
            return step
    return None


def cache_directory(project: Path) -> Path:
    """Prefer the project; fall back when it lies in a directory that is closed to others."""
    if first_closed(project) is None:
        return project / ".cache"
    key = hashlib.sha256(str(project).encode()).hexdigest()[:12]
    return Path("/var/tmp") / f"sbx-tests-{key}"


def _refresh(project: Path, venv: Path) -> None:
    parts = (_digest([project / "pyproject.toml"], project), _python_version(), *TEST_PACKAGES)
    base_key = " ".join(parts)
    base_stamp, project_stamp = venv / "base.stamp", venv / "project.stamp"
    if not _holds(base_stamp, base_key):
        shutil.rmtree(venv, ignore_errors=True)
        _step([*UV, "venv", "--quiet", "--python", str(SYSTEM_PYTHON), str(venv)])
        needed = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))
        packages = [*TEST_PACKAGES, *needed["project"].get("dependencies", [])]
        _pip_install(venv, *packages)
        base_stamp.write_text(base_key)
    project_key = _digest(_sources(project), project)
    if _holds(project_stamp, project_key):
        return
    project_stamp.unlink(missing_ok=True)
    _install(project, venv)
    open_to_all(venv)
    project_stamp.write_text(project_key)


def _install(project: Path, venv: Path) -> None:
    """Build from a copy: build tools leave directories beside the sources they work on."""
    with tempfile.TemporaryDirectory(prefix="sbx-wheel-") as scratch:
        copy, wheels = Path(scratch) / "project", Path(scratch) / "wheels"
        shutil.copytree(project, copy, ignore=_ignored, symlinks=True)
        # With the build tools of the development environment: none are downloaded for it.
        tools = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        build = ("build", "--quiet", "--wheel", "--no-build-isolation", "--python", sys.executable)
        _step([*UV, *build, "--out-dir", str(wheels), str(copy)], env={**os.environ, **tools})
        built = [str(wheel) for wheel in wheels.glob("*.whl")]
        # What it depends on is there. An equal version is no reason to keep the old one.
        _pip_install(venv, "--no-deps", "--reinstall", *built)


def _pip_install(venv: Path, *arguments: str) -> None:
    """Install and compile: its users cannot write there."""
    how = ("--quiet", "--compile-bytecode", "--link-mode=copy")
    _step([*UV, "pip", "install", *how, "--python", str(venv / "bin" / "python"), *arguments])


def _ignored(directory: str, names: list[str]) -> set[str]:
    ignored = shutil.ignore_patterns(*NOT_SOURCE)(directory, names)
    venvs = {name for name in names if (Path(directory) / name / "pyvenv.cfg").exists()}
    return ignored | venvs


def _sources(project: Path) -> list[Path]:
    found: list[Path] = []
    for directory, names, files in os.walk(project):
        ignored = _ignored(directory, [*names, *files])
        names[:] = sorted(set(names) - ignored)
        found.extend(Path(directory) / name for name in sorted(set(files) - ignored))
    return found


def _digest(files: Sequence[Path], project: Path) -> str:
    digest = hashlib.sha256()
    for path in files:
        content = path.readlink().as_posix().encode() if path.is_symlink() else path.read_bytes()
        digest.update(f"{path.relative_to(project)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _holds(stamp: Path, key: str) -> bool:
    return stamp.exists() and stamp.read_text() == key


def _python_version() -> str:
    code = "import sys; print(*sys.version_info[:3])"
    version = _step([str(SYSTEM_PYTHON), "-c", code], hint="apt-get install python3").strip()
    if tuple(int(part) for part in version.split()) < OLDEST_PYTHON:
        message = f"{SYSTEM_PYTHON} is {version}; the project needs 3.11 or newer"
        raise SuiteError(message)
    return version


def _step(
    argv: list[str],
    *,
    hint: str = "",
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> str:
    try:
        done = subprocess.run(
            argv,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BUILD_LIMIT_S,
            umask=0o022,
            cwd=cwd,
            env=env,
        )
    except FileNotFoundError as error:
        message = f"{argv[0]} is missing. {hint}"
        raise SuiteError(message) from error
    if done.returncode != 0:
        message = f"{argv!r} ended with {done.returncode}. {hint}\n{done.stdout}"
        raise SuiteError(message)
    return done.stdout
