"""Try each layer that backends build on by itself, with the smallest plan that needs it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import tempfile
from typing import TYPE_CHECKING, Final

from union.sandbox._core.diagnosis import Layer
from union.sandbox._linux import bwrap, cgroup, gpu, host_programs, kernel, remedies
from union.sandbox._linux.channel import Channel
from union.sandbox._linux.descriptors import sealed_memfd
from union.sandbox._linux.launcher import BINARY, Launcher, NamespaceRefusedError
from union.sandbox._linux.pinning import Places
from union.sandbox._linux.protocol import FailurePlace
from union.sandbox._linux.reader_set import ReaderSet
from union.sandbox._plan import plan as p
from union.sandbox._plan.seatbelt import PROGRAM
from union.sandbox._system import IS_LINUX, IS_MACOS, NAME
from union.sandbox.errors import BackendUnavailableError
from union.sandbox.on_device import _probe
from union.sandbox.on_device._network import network_steps
from union.sandbox.on_device._settings import identity_of_caller

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

__all__ = ["probe_layers"]

_MOUNT, _USER, _PID, _NET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
_ROOT: Final = p.Root("/usr", "mode=755,size=64k")
"""Mounted over a directory that every system has, in the mount namespace of the attempt only."""
_INSIDE_NAMESPACES: Final[dict[str, tuple[int, tuple[p.Step, ...]]]] = {
    "fresh-proc": (_USER | _MOUNT | _PID, (p.Proc("/proc"),)),
    "pivot-root": (_USER | _MOUNT, (_ROOT, p.Enter())),
    "move-root": (_USER | _MOUNT, (_ROOT, p.Enter(move=True))),
    "idmapped-mounts": (_USER | _MOUNT, ()),
    "nf-tables": (_USER | _NET, ()),
}
"""Layer tried inside a user namespace -> clone flags and steps."""


async def probe_layers() -> tuple[Layer, ...]:
    """Return every layer, in the order in which a sandbox needs them."""
    if not IS_LINUX:
        return _portable_layers()
    return (*await _launcher_layers(), *_kernel_layers(), *_system_layers())


def _portable_layers() -> tuple[Layer, ...]:
    from union.sandbox._macos.launcher import PortableLauncher

    binary = str(PortableLauncher.binary())
    layers = [
        Layer(name="linux", available=False, detail=f"this is {NAME}"),
        Layer(
            name="launcher",
            available=os.access(binary, os.X_OK),
            detail=binary,
            hint="reinstall the wheel for this system: pip install --force-reinstall "
            "--only-binary :all: unionai-sandbox",
        ),
    ]
    if IS_MACOS:
        layers.append(
            Layer(
                name="sandbox-exec",
                available=os.access(PROGRAM, os.X_OK),
                detail=PROGRAM,
                hint="it is part of macOS; check that this Mac's system files are intact",
            )
        )
    return (*layers, _uv())


async def _launcher_layers() -> list[Layer]:
    with contextlib.closing(ReaderSet()) as readers:
        return await _probe_launcher(readers)


async def _probe_launcher(readers: ReaderSet) -> list[Layer]:
    names = ("user-namespaces", *_INSIDE_NAMESPACES)
    try:
        channel = Channel(readers)
    except BackendUnavailableError as exc:
        missing = Layer(name="launcher", available=False, detail=str(exc.args[0]), hint=exc.hint)
        return [missing, *(_needs(name, "the launcher") for name in names)]
    try:
        namespaces = await _attempt(channel, "user-namespaces", _USER)
        return [
            Layer(name="launcher", available=True, detail=str(BINARY)),
            namespaces,
            *[
                await _inside(channel, name)
                if namespaces.available
                else _needs(name, "user namespaces")
                for name in _INSIDE_NAMESPACES
            ],
        ]
    finally:
        await channel.drain()
        channel.close()


def _needs(name: str, what: str) -> Layer:
    return Layer(name=name, available=False, detail=f"needs {what}")


async def _inside(channel: Channel, name: str) -> Layer:
    if name == "idmapped-mounts":
        return await _id_mapped(channel)
    flags, steps = _INSIDE_NAMESPACES[name]
    if name != "nf-tables":
        return await _attempt(channel, name, flags, steps)
    found = await _attempt(channel, name, flags, network_steps("filtered", redirect=True))
    if found.available or not kernel.is_gvisor():
        return found
    steps = network_steps("filtered", redirect=True, nf_tables=False)
    found = await _attempt(channel, name, flags, steps)
    return dataclasses.replace(found, detail="by iptables") if found.available else found


async def _attempt(
    channel: Channel,
    name: str,
    clone_flags: int,
    steps: Sequence[p.Step] = (),
    fds: Sequence[int] = (),
) -> Layer:
    """Build a sandbox of these steps alone."""
    who = identity_of_caller()
    plan = p.Plan(
        steps=tuple(steps),
        clone_flags=clone_flags,
        uid=(who.uid, who.host_uid),
        gid=(who.gid, who.host_gid),
        deny_setgroups=who.deny_setgroups,
    )
    encoded = sealed_memfd("plan", plan.encode())
    sock: socket.socket | None = None
    try:
        _, sock = channel.prepare(plan, encoded, fds=fds)
        failure = (await _probe.wait_until_ready(sock)).failure
    finally:
        os.close(encoded)
        if sock is not None:
            sock.close()
    if failure is None:
        return Layer(name=name, available=True)
    what, hint = remedies.cause(*failure)
    return Layer(name=name, available=False, detail=what, hint=hint)


async def _id_mapped(channel: Channel) -> Layer:
    name = "idmapped-mounts"
    if not kernel.is_root():
        return Layer(name=name, available=False, detail="only root needs them")
    if not kernel.can_map_mounts():
        return Layer(
            name=name,
            available=False,
            detail="they need CAP_SYS_ADMIN",
            hint="grant SYS_ADMIN, or run as an ordinary user",
        )
    who = identity_of_caller()
    with tempfile.TemporaryDirectory(prefix=f"sandbox-{os.getpid()}-layer-") as directory:
        try:
            userns = Launcher.current().userns(inside=(0, 0), outside=(who.host_uid, who.host_gid))
        except NamespaceRefusedError as exc:
            what, hint = remedies.cause(FailurePlace.CLONE, exc.errno or 0)
            return Layer(name=name, available=False, detail=what, hint=hint)
        bind = p.Bind(directory, "/work", p.NOSUID | p.NODEV, idmap=0)
        steps = (_ROOT, p.Enter(move=True), bind)
        try:
            return await _attempt(channel, name, _USER | _MOUNT, steps, fds=(userns,))
        finally:
            os.close(userns)


def _kernel_layers() -> list[Layer]:
    abi = kernel.landlock_abi()
    groups = cgroup.hierarchy()
    return [
        Layer(
            name="landlock",
            available=abi > 0,
            detail=f"ABI {abi}" if abi else "this kernel, or a filter over it, has no Landlock",
            hint="Linux 5.13 or newer, with landlock in the lsm= list of the kernel's command line",
        ),
        Layer(
            name="seccomp",
            available=kernel.has_seccomp(),
            hint="a kernel with CONFIG_SECCOMP_FILTER is needed",
        ),
        Layer(
            name="cgroups",
            available=groups is not None,
            detail=f"version {groups.version}: {', '.join(sorted(groups.controllers))}"
            if groups
            else "no control group can be created here; limits are enforced by rlimits and polling",
            hint="delegate one (systemd-run --user --scope -p Delegate=yes COMMAND); pods and "
            "containers have a read-only one, and limits of their own around them",
        ),
    ]


def _system_layers() -> list[Layer]:
    devices = gpu.devices()
    return [
        Layer(
            name="gpu",
            available=bool(devices),
            detail=", ".join(devices) or "no /dev/nvidia0",
            hint="only for programs that want one: install the NVIDIA driver, and give the device "
            "to the container",
        ),
        _uv(),
        _bwrap(),
    ]


def _uv() -> Layer:
    try:
        return Layer(
            name="uv",
            available=True,
            detail=host_programs.version_of(host_programs.find_uv(Places.of(frozenset()))),
        )
    except BackendUnavailableError as exc:
        return Layer(name="uv", available=False, detail=str(exc.args[0]), hint=exc.hint)
    except (OSError, subprocess.SubprocessError) as exc:
        return Layer(name="uv", available=False, detail=str(exc), hint="pip install uv")


def _bwrap() -> Layer:
    try:
        found = bwrap.find()
    except BackendUnavailableError as exc:
        return Layer(name="bwrap", available=False, detail=str(exc.args[0]), hint=exc.hint)
    return Layer(name="bwrap", available=True, detail=f"{found.version}, {found.program}")
