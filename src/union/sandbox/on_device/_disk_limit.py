"""A hard limit on the work dir: it is a tmpfs of that size, which the session's sandboxes share.

The plain directory below stays empty. Files count as memory of the host; a full work dir is ENOSPC
for the program that writes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from union.sandbox._linux.descriptors import close_all
from union.sandbox._linux.tree import WorkTree
from union.sandbox._plan.layers import scratch_plan
from union.sandbox.errors import BackendUnavailableError
from union.sandbox.on_device._work_layers import HeldMount, LayersRefusedError, mounter, perform

if TYPE_CHECKING:
    from union.sandbox._linux.channel import Channel
    from union.sandbox.on_device._posture import Posture
    from union.sandbox.on_device._workdir import WorkDir

__all__ = ["limit_disk", "unavailable"]

_BYTES_PER_FILE: Final = 4096
_MIN_FILES: Final = 1024


def unavailable(backend: str, why: str) -> BackendUnavailableError:
    """Return the error for a session whose work dir cannot be limited."""
    return BackendUnavailableError(
        f"resources.disk is not available: {why}",
        backend=backend,
        missing=("disk limit",),
        hint="use a private work dir with backend='userns' or 'bubblewrap' on Linux, or leave "
        "disk out",
    )


async def limit_disk(work: WorkDir, posture: Posture, channel: Channel, size: int) -> HeldMount:
    """Replace the work dir, in which nothing has run yet, by a tmpfs of ``size`` bytes.

    Raises:
        BackendUnavailableError: the host refuses the mount.

    """
    view, identity = posture.view, posture.identity
    plan = scratch_plan(
        size=size,
        inodes=max(size // _BYTES_PER_FILE, _MIN_FILES),
        owner=mounter(),
        staging=view.staging,
        pivot=view.pivot,
    )
    held = HeldMount()
    try:
        *namespaces, ours, theirs = await perform(plan, channel, count=4)
        try:
            owner = (identity.host_uid, identity.host_gid)
            if os.geteuid() == 0:
                os.chown(f"/proc/self/fd/{ours}", *owner)
            outcome = await posture.root.attach(theirs, channel)
            if outcome.failure is not None:
                raise LayersRefusedError(outcome.failure)
        except BaseException:
            close_all((*namespaces, ours))
            raise
        finally:
            os.close(theirs)
    except LayersRefusedError as exc:
        raise unavailable(
            posture.isolation.backend, f"the host refuses the mount: {exc.strerror}"
        ) from exc
    held.hold(tuple(namespaces))
    work.use(WorkTree(work.path, fd=ours), owner)
    return held
