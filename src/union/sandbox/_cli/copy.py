"""``sbx cp``: copy files and directories into or out of a work dir."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Final

from union.sandbox._cli.signals import run_to_end
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    import argparse

    from union.sandbox._cli.signals import Ending
    from union.sandbox._core.files import Transfer
    from union.sandbox._session.session import Session

__all__ = ["copy"]

_INSIDE: Final = ":"
_REFRESH_S: Final = 0.1
_MAX_BYTES: Final = 2**62
_MAX_FILES: Final = 2**31
"""No limit in practice: a person at a terminal sees the progress and can stop it."""


def copy(options: argparse.Namespace) -> int:
    """Copy SOURCE to TARGET, one of which is in the work dir."""
    source, target = options.source, options.target
    if source.startswith(_INSIDE) == target.startswith(_INSIDE):
        raise SandboxUsageError(
            f"exactly one of {source!r} and {target!r} must begin with a colon",
            argument="SOURCE",
            hint="sbx cp --work-dir DIR data.csv :data.csv",
        )
    local_dir = os.path.isdir(target if source.startswith(_INSIDE) else source)
    show = None if options.quiet or not sys.stderr.isatty() else _Progress()

    async def move() -> Transfer:
        async with _session(options) as sbx:
            # A directory is copied into the target; a file becomes the target, or goes into it.
            if target.startswith(_INSIDE):
                inside = target[1:]
                if not local_dir:
                    inside = _into(inside, await _is_dir(sbx, inside), named=source)
                return await sbx.upload(
                    source, inside or ".", progress=show, max_bytes=_MAX_BYTES, max_files=_MAX_FILES
                )
            inside, local = source[1:], target
            if not await _is_dir(sbx, inside):
                local = _into(local, local_dir, named=inside)
            return await sbx.download(
                inside or ".", local, progress=show, max_bytes=_MAX_BYTES, max_files=_MAX_FILES
            )

    async def work(ending: Ending) -> int:
        del ending  # a signal cancels the copy, and a partial file is removed
        try:
            done = await move()
        except BaseException:
            if show is not None:
                show.clear()  # so that the error starts on an empty line
            raise
        if show is not None:
            show.end(f"{done.files} file{'' if done.files == 1 else 's'}, {_size(done.bytes)}")
        for item in done.skipped:
            if item.reason != "venv":  # always skipped: a copy of it would not work
                sys.stderr.write(f"sbx: skipped {item.path!r} ({item.reason})\n")
        return 0

    return run_to_end(work)


def _session(options: argparse.Namespace) -> Session:
    from union.sandbox import on_device

    chosen = {} if options.backend is None else {"backend": options.backend}
    return on_device.session(host_work_dir=os.path.abspath(options.work_dir), warm=False, **chosen)


async def _is_dir(sbx: Session, path: str) -> bool:
    try:
        found = await sbx.stat(path or ".")
    except FileNotFoundError:
        return False
    return found.kind == "dir"


def _into(target: str, is_dir: bool, *, named: str) -> str:  # noqa: FBT001 - a fact, not a switch
    name = os.path.basename(named.rstrip("/"))
    return os.path.join(target, name) if is_dir or not target or target.endswith("/") else target


def _size(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


class _Progress:
    """A progress line on the terminal, redrawn in place."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, done: int, total: int | None, path: str) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _REFRESH_S
        part = f"{done * 100 // total:3d} %" if total else "  ..."
        # The name may come from sandboxed code, and a terminal executes escape sequences.
        self._draw(f"{part}  {_size(done)}  {ascii(path)[1:-1][-50:]}")

    def clear(self) -> None:
        self._draw("")

    def end(self, text: str) -> None:
        self._draw(text)
        sys.stderr.write("\n")

    def _draw(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
