"""Programs of other Debian releases and architectures, unpacked for the tests.

`make test` and `make test-all` run `python -m tests.environments.debian` first. The tests
themselves download nothing: they skip, with the reason, where an unpacked directory is missing.
Nothing is installed: apt works on a state of its own, with the mirror and the keys of this system.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.environments.suite import PROJECT, TEST_PACKAGES, cache_directory

LIMIT_S = 300.0
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
APT = """\
APT::Architecture "{architecture}";
APT::Architectures {{ "{architecture}"; }};
Dir::State "{state}";
Dir::State::Lists "{state}/lists";
Dir::State::Status "{state}/status";
Dir::Cache "{state}";
Dir::Etc::SourceList "{state}/sources.list";
Dir::Etc::SourceParts "/dev/null";
Acquire::Languages "none";
"""
# Documentation and translations: most of the files, and no test reads one.
NOT_KEPT = ("usr/share/doc", "usr/share/locale", "usr/share/man", "usr/share/info")
WHEELS = Path("packages")
"""Below an unpacked root: the packages from the package index."""
PLATFORMS = ("manylinux_2_17_{machine}", "manylinux_2_28_{machine}")


class DebianError(Exception):
    """Packages could not be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """A directory with the files of some packages."""

    name: str
    architecture: str
    packages: tuple[str, ...]
    suite: str = ""
    """A release of Debian; empty: that of this system."""
    with_dependencies: bool = True
    wheels: tuple[str, ...] = ()
    """Packages of the package index for its Python, which are compiled or execute programs."""

    @property
    def path(self) -> Path:
        """Where it is, if it was made."""
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        return cache_directory(PROJECT) / f"debian-{self.name}-{digest}"

    def lacking(self) -> str | None:
        """Return why it is not there, with the remedy, or None."""
        if self.path.is_dir():
            return None
        return (
            f"Debian's {self.packages[0]} for {self.architecture} is not unpacked in .cache: "
            "python -m tests.environments.debian (needs apt and the mirror of this system)"
        )

    def make(self) -> None:
        """Download and unpack, unless that was done."""
        if self.path.is_dir():
            return
        uri, codename = _mirror()
        with tempfile.TemporaryDirectory(prefix="sbx-debian-") as place:
            state, fresh = Path(place, "state"), Path(place, "fresh")
            for directory in (state / "lists" / "partial", state / "archives" / "partial", fresh):
                directory.mkdir(parents=True)
            os.chmod(place, 0o755)  # apt downloads as another user
            (state / "status").touch()
            (state / "apt.conf").write_text(APT.format(architecture=self.architecture, state=state))
            source = f"deb [signed-by={KEYS}] {uri} {self.suite or codename} main\n"
            (state / "sources.list").write_text(source)
            env = {**os.environ, "APT_CONFIG": str(state / "apt.conf")}
            _run(["apt-get", "--quiet=2", "update"], cwd=state, env=env)
            get = ["install", "--download-only", "--yes", "--no-install-recommends"]
            if not self.with_dependencies:
                get = ["download"]
            archives = state / "archives"
            _run(["apt-get", "--quiet=2", *get, *self.packages], cwd=archives, env=env)
            for package in sorted(archives.glob("*.deb")):
                _run(["dpkg-deb", "--extract", str(package), str(fresh)], cwd=state, env=env)
            for name in NOT_KEPT:
                shutil.rmtree(fresh / name, ignore_errors=True)
            if self.wheels:
                _add_wheels(fresh, self.wheels)
                _compile_library(fresh)
            fresh.chmod(0o755)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(f".partial-{os.getpid()}")
            shutil.copytree(fresh, partial, symlinks=True)
            partial.rename(self.path)


AARCH64 = Unpacked(
    name="aarch64",
    architecture="arm64",
    packages=(
        *("python3", "dash", "bash", "coreutils", "grep", "sed", "findutils", "procps"),
        *("util-linux", "hostname", "bubblewrap", "linux-libc-dev", "libc-bin"),
    ),
    wheels=(*TEST_PACKAGES, "uv"),
)
"""A root directory for programs of another architecture: a Python, and the usual commands."""
RUNSC_2024 = Unpacked(
    name="runsc",
    architecture="amd64",
    packages=("runsc",),
    suite="trixie",
    with_dependencies=False,
)
"""The release of gVisor between the one that this system's Debian has and the one that serves."""
ALL = (AARCH64, RUNSC_2024)


def _mirror() -> tuple[str, str]:
    """Return the address and the release of this system's own Debian packages."""
    if shutil.which("apt-get") is None or not KEYS.is_file():
        raise DebianError("this is not a Debian system")
    line = "$(REPO_URI) $(CODENAME)"
    command = ["apt-get", "indextargets", "--format", line, "Created-By: Packages", "Label: Debian"]
    found = _run(command, cwd=Path("/"), env=os.environ).split("\n")
    # Not the updates of a release, which have few packages.
    releases = [row.split() for row in found if row and "-" not in row.split()[1]]
    if not releases:
        raise DebianError("apt knows no mirror of Debian: apt-get update")
    return releases[0][0], releases[0][1]


def _add_wheels(root: Path, wheels: tuple[str, ...]) -> None:
    """Add packages for the Python of `root`: compiled ones, and programs such as uv."""
    (python,) = (root / "usr" / "lib").glob("python3.*")
    options = ["--target", str(root / WHEELS), "--only-binary=:all:", "--implementation", "cp"]
    options += ["--python-version", python.name.removeprefix("python")]
    for name in PLATFORMS:
        options += ["--platform", name.format(machine="aarch64")]
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    _run([*pip, *options, *wheels], cwd=Path("/"), env=os.environ)


def _compile_library(root: Path) -> None:
    """Compile the standard library of `root` with this Python, if both have the same format.

    Debian does it when a package is configured, and here nothing is. An emulated Python would
    compile every module anew at each start.
    """
    (library,) = (root / "usr" / "lib").glob("python3.*")
    if library.name == "python{}.{}".format(*sys.version_info[:2]):
        _run([sys.executable, "-m", "compileall", "-q", str(library)], cwd=root, env=os.environ)


def _run(command: list[str], *, cwd: Path, env: os._Environ[str] | dict[str, str]) -> str:
    done = subprocess.run(
        command,
        check=False,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        umask=0o022,
    )
    if done.returncode != 0:
        raise DebianError(f"{command[0]} {command[-1]}: {done.stderr.strip()[-400:]}")
    return done.stdout


def main() -> int:
    """Make what is missing. A test without it says so itself, so this never fails."""
    for wanted in ALL:
        try:
            wanted.make()
        except (DebianError, OSError, ValueError, subprocess.TimeoutExpired) as error:
            print(f"debian: {wanted.name} could not be had: {error}; continuing without")
    return 0


if __name__ == "__main__":
    sys.exit(main())
