"""Programs for aarch64 on another machine, executed by qemu-user.

The kernel executes them through binfmt_misc, which a user namespace has of its own (Linux 6.7):
nothing of the machine is changed. qemu-user translates the calls of a program; it has no namespaces
(clone with their flags is EINVAL), no seccomp, no Landlock, no openat2 and no subreaper. So no
sandbox can be built in it, nor `none` of the Linux engine. The portable engine works.

By hand: `python -m tests.environments.aarch64 python3 -c 'import os; print(os.uname())'`.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hatch_build import LAUNCHER, MAC_SOURCES, ZIG_EXTRA, Compiler, _zig
from tests.environments.debian import AARCH64, WHEELS
from tests.environments.suite import PROJECT, cache_directory
from tests.environments.supervise import Outcome, run_supervised

if TYPE_CHECKING:
    from collections.abc import Sequence

EMULATOR = "qemu-aarch64-static"
LIMIT_S = 600.0
# The first bytes of a program for aarch64, and the bits of them that count. F: the emulator is
# opened now, so that it need not exist below another root. P: argv[0] stays as the caller gave it.
_MAGIC = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
_MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
_BINFMT = "/proc/sys/fs/binfmt_misc"
_REGISTER = f"""\
set -eu
mount -t binfmt_misc none {_BINFMT}
printf %s ':aarch64:M::{_MAGIC}:{_MASK}:'"$EMULATOR"':FP' >{_BINFMT}/register
"""
_ENTER = (
    _REGISTER
    + """\
mount -t tmpfs tmpfs "$PLACE"
mkdir "$PLACE/upper" "$PLACE/work" "$PLACE/root"
mount -t overlay overlay -o "lowerdir=$ROOT,upperdir=$PLACE/upper,workdir=$PLACE/work" "$PLACE/root"
cd "$PLACE/root"
mkdir -p project proc dev tmp var/tmp launchers
mount --rbind /proc proc
mount --rbind /dev dev
mount -t tmpfs tmpfs tmp
mount --rbind "$PROJECT" project
mount --bind "$LAUNCHERS" launchers
mount --bind "$LAUNCHERS/linux" "project/$LAUNCHER"
exec chroot . /usr/bin/env -i "$@"
"""
)
_UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child")


def lacking() -> str | None:
    """Return what this machine lacks to execute and compile programs for aarch64, or None."""
    if shutil.which(EMULATOR) is None:
        return f"{EMULATOR} is not installed: apt-get install qemu-user-static"
    if (reason := AARCH64.lacking()) is not None:
        return reason
    if importlib.util.find_spec("ziglang") is None:
        return "the compiler for aarch64 is missing: pip install --group dist"
    if (reason := _refused()) is not None:
        return f"binfmt_misc cannot be mounted in a user namespace (Linux 6.7 has that): {reason}"
    return None


@functools.cache
def _refused() -> str | None:
    done = subprocess.run(
        [*_UNSHARE, "--mount-proc", "sh", "-c", _REGISTER],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "EMULATOR": str(shutil.which(EMULATOR))},
    )
    return done.stderr.strip() if done.returncode else None


def launchers() -> Path:
    """Return the directory with both launchers, compiled for aarch64; made if it is stale."""
    native = PROJECT / "native"
    digest = hashlib.sha256()
    for path in sorted((*native.rglob("*.[ch]"), PROJECT / "hatch_build.py")):
        digest.update(path.read_bytes())
    cache = cache_directory(PROJECT)
    made = cache / f"launchers-aarch64-{digest.hexdigest()[:12]}"
    compiler = Compiler(command=_zig("aarch64"), extra=(*ZIG_EXTRA, "-static"))
    portable = [name for name in MAC_SOURCES if "os_macos" not in name]
    with (cache / "launchers-aarch64.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_dir():
            partial = made.with_suffix(f".partial-{os.getpid()}")
            partial.mkdir()
            compiler.build(sorted(native.glob("*.c")), partial / "linux")
            sources = [native / name for name in (*portable, "posix/os_linux.c")]
            compiler.build(sources, partial / "portable")
            partial.rename(made)
    return made


def run(
    argv: Sequence[str], *, portable: bool = False, timeout_s: float = LIMIT_S, **variables: str
) -> Outcome:
    """Run a command in a root directory for aarch64, with the project in /project.

    Args:
        argv: the command.
        portable: Pythons use the portable engine, as `tests.portable` has it.
        timeout_s: after this time everything is killed.
        variables: of its environment.

    """
    path = ["/project/src", f"/{WHEELS}"]
    if portable:
        path.insert(0, "/project/tests/portable/site")
        variables["SANDBOX_TEST_PORTABLE_LAUNCHER"] = "/launchers/portable"
    env = {
        "PATH": f"/{WHEELS}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "PYTHONPATH": ":".join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
        **variables,
    }
    words = [f"{name}={value}" for name, value in env.items()]
    outer = {
        **os.environ,
        "EMULATOR": str(shutil.which(EMULATOR)),
        "ROOT": str(AARCH64.path),
        "PROJECT": str(PROJECT),
        "PLACE": "/mnt",
        "LAUNCHERS": str(launchers()),
        "LAUNCHER": LAUNCHER.as_posix(),
    }
    inside = 'cd /project && exec "$@"'
    command = [*_UNSHARE, "--mount-proc", "sh", "-c", _ENTER, "sh", *words]
    return run_supervised(
        [*command, "/bin/sh", "-c", inside, "sh", *argv],
        timeout_s=timeout_s,
        env=outer,
        cwd=Path("/"),
    )


def main() -> int:
    """Run a command for aarch64; return its exit code."""
    if (reason := lacking()) is not None:
        sys.stderr.write(f"aarch64: {reason}\n")
        return 2
    done = run(sys.argv[1:])
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
