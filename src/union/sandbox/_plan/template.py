"""The root of a session's template, and the step that starts it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from union.sandbox._plan import plan as p
from union.sandbox._plan.rootfs import (
    OWN_MOUNTS,
    RUN_DIR,
    View,
    _below,
    _by_depth,
    _held,
    _is_below,
    _Layout,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Template", "template_steps"]

_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Template(p.Step):
    """Execute an interpreter of which sandboxes are forked; always last."""

    op: ClassVar[int] = 48
    argv: tuple[str, ...]
    env: tuple[str, ...]

    def blobs(self) -> tuple[bytes, ...]:
        texts = ("".join(f"{text}\0" for text in texts) for texts in (self.argv, self.env))
        return tuple(text.encode("utf-8", "surrogateescape") for text in texts)


def template_steps(
    view: View, *, files: Mapping[str, bytes], links: Mapping[str, str]
) -> tuple[p.Step, ...]:
    """Return the steps that turn a copy of the shared part into the root of a template.

    A template executes only what the owner trusts, so everything that sandboxed code can write is
    covered there by an empty directory or file.

    Args:
        view: the view of the session.
        files: path -> content of files to create, below the work dir or in memory.
        links: path -> target of links to create, all below the work dir.

    """
    out = _Layout()
    out.made(OWN_MOUNTS)
    out.steps.extend(p.Tmpfs(path, _BYTES) for path in OWN_MOUNTS)
    for place, shown in _held(view):
        if not shown.writable:
            # The source was opened before the first step, so it is covered by now.
            kept = dataclasses.replace(shown, source=place, fd=None, idmap=None, identity=(0, 0))
            out.bind(kept, _below(view, shown))
    writable = [s for s in view.added if s.writable and not _is_below(s.path, OWN_MOUNTS)]
    empty = f"{RUN_DIR}/empty"
    if any(not shown.is_dir for shown in writable):
        out.steps.append(p.File(empty))
    covered: list[str] = []
    for shown in _by_depth(writable):
        if _is_below(shown.path, covered):
            continue
        if shown.is_dir:
            out.steps.append(p.Tmpfs(shown.path, _BYTES, mode=0o755))
            covered.append(shown.path)
        else:
            out.steps.append(p.Cover(shown.path, empty))
    out.made(covered)
    for path, content in files.items():
        out.parents(path)
        out.steps.append(p.File(path, content))
    for path, target in links.items():
        out.parents(path)
        out.steps.append(p.Symlink(path, target))
    return tuple(out.steps)
