"""Lexical checks of paths given by callers.

No file system is accessed. The result has no ``..``, no empty component and no leading slash. The
kernel rejects symbolic links when the path is opened.
"""

from __future__ import annotations

from typing import Final

from union.sandbox._core.file_errors import SandboxPathError, shown_path
from union.sandbox.errors import SandboxUsageError

__all__ = ["shown_path", "visible_path", "work_path"]

MAX_NAME_BYTES: Final = 255
MAX_PATH_BYTES: Final = 4095
"""The kernel's PATH_MAX of 4096 without the terminating NUL."""


def work_path(
    path: object, *, work_dir: str, argument: str = "path", allow_root: bool = False
) -> str:
    """Return ``path`` relative to ``work_dir``, without ``.`` and repeated slashes.

    ``work_dir`` itself is returned as ``"."`` if ``allow_root`` is true and rejected otherwise.

    Preconditions: ``work_dir`` is absolute.
    """
    text = _text(path, argument=argument)
    names = [name for name in text.split("/") if name not in {"", "."}]
    if ".." in names:
        # Rejected even if it stays inside lexically: the kernel resolves it after links.
        raise _outside(text, argument=argument, work_dir=work_dir, why="has a '..' component")
    if text.startswith("/"):
        root = [name for name in work_dir.split("/") if name not in {"", "."}]
        if names[: len(root)] != root:
            raise _outside(text, argument=argument, work_dir=work_dir, why="is outside")
        names = names[len(root) :]
    for name in names:
        if len(_encoded(name)) > MAX_NAME_BYTES:
            msg = (
                f"{argument}={shown_path(text)} has a component of {len(_encoded(name))} bytes; "
                f"the limit is {MAX_NAME_BYTES}"
            )
            raise SandboxUsageError(msg, argument=argument, code="path-too-long")
    if not names and not allow_root:
        msg = f"{argument}={shown_path(text)} is the work dir itself; a path below it is required"
        raise SandboxUsageError(msg, argument=argument, code="path-is-root")
    return "/".join(names) or "."


def visible_path(path: object, *, work_dir: str, argument: str = "path") -> str:
    """Return a path as the sandbox resolves it: any absolute one, or relative to ``work_dir``.

    A path below ``work_dir`` is returned relative to it, and ``work_dir`` itself as ``"."``. A path
    with ``..`` is returned as it is, because a link may come before.
    """
    text = _text(path, argument=argument)
    if ".." in text.split("/"):
        return text
    names = [name for name in text.split("/") if name not in {"", "."}]
    if not text.startswith("/"):
        return "/".join(names) or "."
    root = [name for name in work_dir.split("/") if name not in {"", "."}]
    if names[: len(root)] == root:
        return "/".join(names[len(root) :]) or "."
    return "/" + "/".join(names)


def _text(path: object, *, argument: str) -> str:
    given = path
    if not isinstance(given, (str, bytes)):
        convert = getattr(type(given), "__fspath__", None)
        given = given if convert is None else convert(given)
    if isinstance(given, bytes):
        given = given.decode("utf-8", "surrogateescape")
    if not isinstance(given, str):
        msg = f"{argument} must be a str, bytes or path object, not {type(path).__name__}"
        raise SandboxUsageError(msg, argument=argument, code="path-type")
    if not given:
        msg = f"{argument} is empty; a path in the work dir is required"
        raise SandboxUsageError(msg, argument=argument, code="path-empty")
    if "\0" in given:
        msg = f"{argument}={shown_path(given)} has a NUL character, which no file name can have"
        raise SandboxUsageError(msg, argument=argument, code="path-nul")
    try:
        size = len(_encoded(given))
    except UnicodeEncodeError:
        msg = f"{argument}={shown_path(given)} has a lone surrogate that stands for no byte"
        raise SandboxUsageError(msg, argument=argument, code="path-encoding") from None
    if size > MAX_PATH_BYTES:
        msg = f"{argument} has {size} bytes; the limit is {MAX_PATH_BYTES}"
        raise SandboxUsageError(msg, argument=argument, code="path-too-long")
    return given


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _outside(text: str, *, argument: str, work_dir: str, why: str) -> SandboxPathError:
    return SandboxPathError(
        f"{argument}={shown_path(text)} {why}; only paths in the work dir are accepted",
        path=text,
        argument=argument,
        hint=f"use a relative path, or an absolute one below {work_dir}",
    )
