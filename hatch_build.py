"""Compiles the native launcher when a wheel is built on Linux, or for macOS.

The launcher is an executable that is linked statically, so one wheel per architecture serves every
Python and every libc: the tag is ``py3-none-linux_<arch>``. Elsewhere, and with
``UNION_SANDBOX_SKIP_NATIVE=1``, nothing is compiled and the wheel is pure.

The compiler is ``UNION_SANDBOX_CC`` if that is set (and then no other is tried), else the first of
``cc``, ``gcc``, ``clang`` that can link a static program, else the one in the PyPI package
``ziglang``, which becomes a build requirement only then.

``UNION_SANDBOX_TARGET=x86_64`` or ``aarch64`` builds for publishing: for that architecture,
whatever this one is, by ``ziglang`` alone, with the tags under which package indexes accept it.
``macos-arm64`` and ``macos-x86_64`` do the same for macOS, with the portable launcher. On a Mac,
``cc`` compiles that launcher for the Mac itself.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LAUNCHER = Path("src/union/sandbox/_linux/bin/sandbox-launcher")
# The launcher's code as a library, which a template (native/template.c) loads into Python. Without
# it, or with a C library that it does not fit, every Python is started instead of forked.
LIBRARY = LAUNCHER.with_name("sandbox-template.so")

COMPILE_FLAGS = (
    "-std=c11",
    "-O2",
    "-D_GNU_SOURCE",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fstack-protector-strong",
    # Some distributions predefine another level; redefining it would be a warning.
    "-U_FORTIFY_SOURCE",
    "-D_FORTIFY_SOURCE=2",
)
LIBRARY_FLAGS = ("-fPIC", "-shared", "-fvisibility=hidden")
LINK_FLAGS = ("-s", "-Wl,-z,relro,-z,now")
# In order of preference: a static program at a random address, or merely a static one.
STATIC_WAYS = ("-static-pie", "-static")

# For whom wheels are published. The launcher is static, so it fits every libc; the oldest tags of
# each say so.
TARGETS = {
    arch: f"py3-none-manylinux_2_17_{arch}.manylinux2014_{arch}.musllinux_1_1_{arch}"
    for arch in ("x86_64", "aarch64")
}

# macOS: the portable launcher. It is linked with the system's library, as every program there must
# be. zig signs it ad hoc, without which Apple's processors execute nothing.
MAC_LAUNCHER = Path("src/union/sandbox/_macos/bin/sandbox-launcher")
MAC_SOURCES = (
    "posix/launcher.c",
    "posix/run.c",
    "posix/begin.c",
    "posix/frame.c",
    "posix/inside.c",
    "posix/tree.c",
    "posix/os_macos.c",
    "request.c",
)
MAC_TARGETS = {
    "macos-arm64": ("aarch64-macos.13.0", "py3-none-macosx_13_0_arm64"),
    "macos-x86_64": ("x86_64-macos.13.0", "py3-none-macosx_13_0_x86_64"),
}
MAC_FLAGS = (
    "-std=c11",
    "-O2",
    "-D_DARWIN_C_SOURCE",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fstack-protector-strong",
)

# Uses what the launcher needs of a libc: its headers, and its archive for linking.
TRIAL_SOURCE = """\
#include <sys/syscall.h>
#include <unistd.h>
int main(void) { return syscall(SYS_getpid) > 0 ? 0 : 1; }
"""


class LauncherBuildError(RuntimeError):
    """The launcher could not be built; the text says why and what to do."""


class Compiler(NamedTuple):  # not a dataclass: hatchling runs this file outside sys.modules
    """A command that is known to make static programs when given ``extra`` flags."""

    command: tuple[str, ...]
    extra: tuple[str, ...]

    def build(self, sources: list[Path], output: Path) -> None:
        """Compile and link ``sources`` to ``output``; raise with the compiler's own words."""
        done = _compile(self, sources, output)
        if done.returncode != 0:
            raise LauncherBuildError(
                f"{shlex.join(done.args)} exited with {done.returncode}:\n{done.stdout}"
            )


def _compile(
    compiler: Compiler, sources: list[Path], output: Path
) -> subprocess.CompletedProcess[str]:
    # The last flag about a warning wins, so what a compiler needs extra comes after ours.
    program = () if "-shared" in compiler.extra else ("-fPIE",)
    flags = (*COMPILE_FLAGS, *program, *compiler.extra, *LINK_FLAGS)
    return subprocess.run(
        [*compiler.command, *flags, *map(str, sources), "-o", str(output)],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=_environment(output.parent),
    )


def _environment(scratch: Path) -> dict[str, str]:
    env = dict(os.environ)
    home = Path(env.get("HOME") or "/")
    if "ZIG_GLOBAL_CACHE_DIR" not in env and not os.access(home, os.W_OK):
        # zig refuses to work without a cache, and an account may have no home to keep it in.
        env["ZIG_GLOBAL_CACHE_DIR"] = str(scratch / "zig-cache")
    return env


def _usable(
    command: tuple[str, ...], *, extra: tuple[str, ...] = ()
) -> tuple[Compiler | None, str]:
    """Return ``command`` with the static way that works, or None and the reason."""
    reason = ""
    with tempfile.TemporaryDirectory(prefix="sandbox-launcher-") as scratch:
        source = Path(scratch, "trial.c")
        source.write_text(TRIAL_SOURCE)
        for static in STATIC_WAYS:
            compiler = Compiler(command=command, extra=(*extra, static))
            output = Path(scratch, "trial")
            try:
                done = _compile(compiler, [source], output)
            except OSError as exc:
                return None, str(exc)
            # A program that links but does not start (some static-pie toolchains) is no use.
            if done.returncode == 0 and subprocess.run([output], check=False).returncode == 0:
                return compiler, ""
            reason = reason or done.stdout.strip() or "it makes no program that starts"
    return None, reason


@functools.cache
def system_compiler() -> Compiler | None:
    """Return the compiler to use that is here already, or None if it has to come from ziglang."""
    if chosen := os.environ.get("UNION_SANDBOX_CC"):
        compiler, reason = _usable(tuple(shlex.split(chosen)))
        if compiler is None:
            raise LauncherBuildError(
                f"UNION_SANDBOX_CC={chosen!r} cannot make a static program: {reason}"
            )
        return compiler
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            compiler, _ = _usable((path,))
            if compiler is not None:
                return compiler
    return None


# musl's own CMSG_NXTHDR compares signed with unsigned, and zig 0.17 warns about that.
ZIG_EXTRA = ("-Wno-sign-compare",)


def _zig(target: str, libc: str = "musl") -> tuple[str, ...]:
    return (sys.executable, "-m", "ziglang", "cc", "-target", f"{target}-linux-{libc}")


def _for_library(compiler: Compiler, target: str) -> Compiler:
    """Return the compiler that makes a library: not static, and for the C library of Python."""
    command = compiler.command
    if "ziglang" in command:
        command = _zig(target or os.uname().machine, "gnu.2.28")
    extra = tuple(flag for flag in compiler.extra if flag not in STATIC_WAYS)
    return Compiler(command=command, extra=(*extra, *LIBRARY_FLAGS))


def zig_compiler() -> Compiler:
    """Return the compiler of the ``ziglang`` package, set to link against its own static musl."""
    target = os.uname().machine
    if sys.maxsize < 2**32 and target == "x86_64":
        target = "x86"  # a 32-bit Python on a 64-bit kernel
    compiler, reason = _usable(_zig(target), extra=ZIG_EXTRA)
    if compiler is None:
        raise LauncherBuildError(
            "the launcher needs a C compiler that can link statically; none of cc, gcc, clang can,"
            f" and ziglang does not work here either: {reason}\n"
            "Install one (Debian: apt-get install gcc libc6-dev), name one in UNION_SANDBOX_CC, or"
            " set UNION_SANDBOX_SKIP_NATIVE=1 to install without the Linux backends."
        )
    return compiler


def publishing_for() -> str:
    """Return the architecture that a wheel is to be published for; empty for this machine."""
    target = os.environ.get("UNION_SANDBOX_TARGET", "")
    if target and target not in TARGETS and target not in MAC_TARGETS:
        known = ", ".join((*TARGETS, *MAC_TARGETS))
        raise LauncherBuildError(f"UNION_SANDBOX_TARGET={target!r} is not known; known: {known}")
    return target


def wants_native() -> bool:
    """Say whether this build has a launcher in it."""
    has_one = sys.platform in {"linux", "darwin"}
    return has_one and os.environ.get("UNION_SANDBOX_SKIP_NATIVE", "") in {"", "0"}


class LauncherBuildHook(BuildHookInterface[Any]):
    """Puts the launcher into the wheel, or into the source tree of an editable install."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Ask for ziglang, which is large, only if there is nothing else to compile with."""
        if not wants_native() or (sys.platform == "darwin" and not publishing_for()):
            return []
        return ["ziglang"] if publishing_for() or system_compiler() is None else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 (an editable wheel needs the launcher just as well)
        """Build the launcher and mark the wheel as belonging to its architecture."""
        if not wants_native():
            return
        build_data["pure_python"] = False
        target = publishing_for()
        if target in MAC_TARGETS or (not target and sys.platform == "darwin"):
            self._build_for_mac(target, build_data)
            return
        if target:
            # Apart from the source tree, whose own launcher is for this machine. No trial: what is
            # made may not start here. zig makes it position-independent with this flag as well.
            launcher = Path(self.root, "build", "launcher", target, LAUNCHER.name)
            self._build(
                Compiler(command=_zig(target), extra=(*ZIG_EXTRA, "-static")), launcher, target
            )
            build_data["tag"] = TARGETS[target]
            for place in (LAUNCHER, LIBRARY):
                built = str(launcher.with_name(place.name))
                build_data["force_include"][built] = place.relative_to("src").as_posix()
            return
        self._build(system_compiler() or zig_compiler(), Path(self.root, LAUNCHER))
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(
            ".", "_"
        )
        build_data["artifacts"] += [LAUNCHER.as_posix(), LIBRARY.as_posix()]

    def _build_for_mac(self, target: str, build_data: dict[str, Any]) -> None:
        """Build the portable launcher: for publishing with ziglang, or on a Mac with its own cc."""
        if target:
            triple, build_data["tag"] = MAC_TARGETS[target]
            compiler = [sys.executable, "-m", "ziglang", "cc", "-target", triple, "-Wl,-s"]
            launcher = Path(self.root, "build", "launcher", target, MAC_LAUNCHER.name)
            build_data["force_include"][str(launcher)] = MAC_LAUNCHER.relative_to("src").as_posix()
        else:
            compiler = shlex.split(os.environ.get("UNION_SANDBOX_CC") or "cc")
            launcher = Path(self.root, MAC_LAUNCHER)
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
            build_data["artifacts"].append(MAC_LAUNCHER.as_posix())
        launcher.parent.mkdir(parents=True, exist_ok=True)
        sources = [str(Path(self.root, "native", name)) for name in MAC_SOURCES]
        command = [*compiler, *MAC_FLAGS, *sources, "-o", str(launcher)]
        hint = "Install the Command Line Tools (xcode-select --install), name a C compiler in "
        hint += "UNION_SANDBOX_CC, or set UNION_SANDBOX_SKIP_NATIVE=1 to install without backends."
        try:
            done = subprocess.run(
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=_environment(launcher.parent),
            )
        except OSError as exc:
            raise LauncherBuildError(f"{compiler[0]}: {exc.strerror}. {hint}") from exc
        if done.returncode != 0:
            raise LauncherBuildError(
                f"{shlex.join(command)} exited with {done.returncode}:\n{done.stdout}\n{hint}"
            )
        launcher.chmod(0o755)

    def _build(self, compiler: Compiler, launcher: Path, target: str = "") -> None:
        sources = sorted(Path(self.root).glob("native/*.c"))
        if not sources:
            raise LauncherBuildError(f"no C source in {self.root}/native: the tree is not complete")
        launcher.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=launcher.parent) as scratch:
            fresh = Path(scratch, launcher.name)
            compiler.build(sources, fresh)
            fresh.chmod(0o755)
            # A running launcher cannot be written to, but it can be replaced.
            fresh.replace(launcher)
            library = Path(scratch, LIBRARY.name)
            shared = [source for source in sources if source.name != "main.c"]
            shared += sorted(Path(self.root).glob("native/template/*.c"))
            _for_library(compiler, target).build(shared, library)
            library.replace(launcher.with_name(LIBRARY.name))
