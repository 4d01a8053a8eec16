"""The engine of this system: the parts of a session that differ between Linux and others.

Everything else in this package is the same on both. Imports are inside the functions, so that a
Mac loads nothing that only Linux has, and Linux nothing that only a Mac has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from union.sandbox._linux.channel import Channel
from union.sandbox._linux.reader_set import ReaderSet
from union.sandbox._system import IS_LINUX

if TYPE_CHECKING:
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._linux.ids import SessionId
    from union.sandbox.on_device._posture import Posture
    from union.sandbox.on_device._probe import HostFeatures
    from union.sandbox.on_device._programs import Programs
    from union.sandbox.on_device._settings import HostSetting
    from union.sandbox.on_device._workdir import WorkDir

__all__ = ["inspect", "new_channel", "new_readers", "posture_class"]


def new_readers() -> ReaderSet:
    """Return the descriptors that a session reads, in the running event loop."""
    if IS_LINUX:
        return ReaderSet()
    from union.sandbox._macos.readers import LoopReaders

    return LoopReaders()


def new_channel(readers: ReaderSet) -> Channel:
    """Return a new channel to this process's launcher."""
    if IS_LINUX:
        return Channel(readers)
    from union.sandbox._macos.launcher import PortableChannel

    return PortableChannel(readers)


def inspect(
    spec: SessionSpec,
    work: WorkDir,
    *,
    features: HostFeatures,
    programs: Programs,
    own: SessionId,
) -> HostSetting:
    """Inspect the host once. Raises if a path of the caller is missing or refused."""
    if IS_LINUX:
        from union.sandbox.on_device._settings import inspect_host

        return inspect_host(spec, work, features=features, programs=programs, own=own)
    from union.sandbox.on_device._portable_posture import inspect_portable

    return inspect_portable(spec, work, programs=programs)


def posture_class(backend: str) -> type[Posture]:
    """Return the class that compiles the settings of a session with this backend."""
    if IS_LINUX:
        from union.sandbox.on_device._posture import Posture

        return Posture
    if backend == "sandbox-exec":
        from union.sandbox.on_device._seatbelt import SeatbeltPosture

        return SeatbeltPosture
    from union.sandbox.on_device._portable_posture import PortablePosture

    return PortablePosture
