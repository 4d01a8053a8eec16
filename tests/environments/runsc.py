"""A runsc (gVisor) that is new enough for sandboxes inside it.

Debian's package is too old. The environment variable SANDBOX_TEST_RUNSC names another, plain or
compressed with xz; else `shared/tools/runsc.xz` next to the project is used where it exists.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import lzma
import os
import platform
import shutil
from pathlib import Path

from tests.environments.suite import PROJECT, cache_directory

VARIABLE = "SANDBOX_TEST_RUNSC"
RELEASE = "2026-08"
"""Of the runsc that the pages describe."""
# systrap needs neither KVM nor ptrace. There is no network stack to set up, and no cgroup to make.
OPTIONS = ("--platform=systrap", "--network=none", "--ignore-cgroups")
_BESIDE = Path("shared") / "tools" / "runsc.xz"


def lacking() -> str | None:
    """Return why there is no runsc for the tests, or None."""
    if _found() is not None:
        return None
    if os.environ.get(VARIABLE):
        return f"{VARIABLE}={os.environ[VARIABLE]!r} is not a file; name a runsc, or unset it"
    return (
        f"no runsc is new enough: set {VARIABLE} to one of release-20260622 or newer "
        f"(Debian's is too old), for {platform.machine()}"
    )


def _found() -> Path | None:
    named = os.environ.get(VARIABLE)
    # A work tree of the project may lie one directory deeper.
    places = [Path(named)] if named else [above / _BESIDE for above in PROJECT.parents[:2]]
    return next((path for path in places if path.is_file()), None)


@functools.cache
def command() -> tuple[str, ...]:
    """Return the start of the command line of the new runsc; decompress it once."""
    found = _found()
    if found is None:
        raise FileNotFoundError(lacking())
    return (str(_unpacked(found) if found.suffix == ".xz" else found), *OPTIONS)


def _unpacked(packed: Path) -> Path:
    cache = cache_directory(PROJECT)
    cache.mkdir(parents=True, exist_ok=True)
    with packed.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    program = cache / f"runsc-{digest}"
    with (cache / "runsc.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            partial = program.with_suffix(".partial")
            with lzma.open(packed) as source, partial.open("wb") as target:
                shutil.copyfileobj(source, target)
            partial.chmod(0o755)
            partial.rename(program)
    return program
