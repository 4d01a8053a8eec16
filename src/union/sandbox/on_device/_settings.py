"""Derive the inputs of a plan from a session's spec and this host: view, identity, limits."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from union.sandbox._backends.base import Identity
from union.sandbox._backends.registry import HOST_ROOT
from union.sandbox._linux import cgroup, epoll_watches, gpu, host, inherited, kernel
from union.sandbox._linux.ids import SessionId, id_range
from union.sandbox._linux.launcher import Launcher
from union.sandbox._linux.pinning import LinkInWritablePlaceError, Places, identity_of, pin
from union.sandbox._plan.rootfs import NetworkFile, Shown, View
from union.sandbox.errors import PolicyError, SandboxUsageError
from union.sandbox.on_device import _host_root
from union.sandbox.on_device._kernel_files import counters, guarded_proc, hidden_proc
from union.sandbox.on_device._network import resolv_conf
from union.sandbox.on_device._programs import owner_paths
from union.sandbox.on_device._read_only import ReadOnlyPaths, refuse_on_tmpfs
from union.sandbox.on_device._workdir import not_allowed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from union.sandbox._core.spec import Limits, SessionSpec
    from union.sandbox.on_device._probe import HostFeatures
    from union.sandbox.on_device._programs import Programs
    from union.sandbox.on_device._workdir import WorkDir

__all__ = [
    "HostSetting",
    "ca_files",
    "deduplicated",
    "identity_of_caller",
    "inspect_host",
    "limit_report",
    "name_files_now",
    "named_paths",
]

_INSIDE_ID: Final = 1000
"""The id inside of a sandbox whose caller is root."""
_HOSTS: Final = b"127.0.0.1\tlocalhost sandbox\n::1\tlocalhost sandbox\n"
_HOSTS_FILE: Final = "/etc/hosts"
_RESOLVER_FILE: Final = "/etc/resolv.conf"
_NSSWITCH: Final = b"passwd: files\ngroup: files\nhosts: files dns\n"
_WORK_MOUNT_POINTS: Final = ("/tmp", "/var", "/proc", "/usr")  # noqa: S108 - any directory does


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSetting:
    """The view, identity and variables of one session on this host."""

    identity: Identity
    view: View
    fds: tuple[int, ...]
    """File descriptors that binds refer to by index; the receiver owns them."""
    host_env: dict[str, str]
    """Environment variables of every command that depend on this host."""
    python: host.Interpreter
    scratch: str | None = None
    """The session's own directory beside the work dir, where there is no private root."""
    read_only: ReadOnlyPaths
    """Read-only paths in writable directories; the caller of ``inspect_host`` closes it."""
    name_files: tuple[tuple[int, int] | None, ...]
    """The result of ``name_files_now()`` at that time."""


def identity_of_caller() -> Identity:
    """Return the identity of this process's sandboxes, if every file system supports it."""
    own = SessionId()
    try:
        return _identity(own, isolated=True, idmap=True, own_everything=True)
    finally:
        own.release()


def _identity(own: SessionId, *, isolated: bool, idmap: bool, own_everything: bool) -> Identity:
    """Return the identity of sandboxed code; for root an id that owns nothing, if possible.

    The caller's trees are then mapped to that id by id-mapped mounts. Where the kernel or the file
    system does not support these and all writable trees are the session's own, their owner is
    changed instead.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0 or not isolated:
        return Identity(
            uid=uid,
            gid=gid,
            host_uid=uid,
            host_gid=gid,
            kind="caller" if isolated else "host",
            deny_setgroups=True,
        )
    can_be = (idmap and kernel.can_map_mounts()) or (own_everything and kernel.can_give_away())
    if can_be and id_range() is not None:
        return Identity(
            uid=_INSIDE_ID,
            gid=_INSIDE_ID,
            host_uid=own.number,
            host_gid=own.number,
            kind="unprivileged",
            deny_setgroups=False,
        )
    return Identity(
        uid=_INSIDE_ID,
        gid=_INSIDE_ID,
        host_uid=0,
        host_gid=gid,
        kind="caller",
        deny_setgroups=True,
    )


class _Mapper:
    """Map the owner of writable trees to the sandbox's id by id-mapped mounts."""

    def __init__(self, identity: Identity, *, idmap: bool) -> None:
        self._identity = identity
        self.enabled = idmap and identity.kind == "unprivileged" and kernel.can_map_mounts()
        self._found: dict[tuple[int, int], int] = {}

    def mapped(self, item: Shown, owner: tuple[int, int]) -> Shown:
        if not self.enabled:
            return item
        outside = (self._identity.host_uid, self._identity.host_gid)
        if owner not in self._found:
            self._found[owner] = Launcher.current().userns(inside=owner, outside=outside)
        return dataclasses.replace(item, idmap=list(self._found).index(owner))

    @property
    def fds(self) -> tuple[int, ...]:
        return tuple(self._found.values())

    def close(self) -> None:
        for fd in self._found.values():
            os.close(fd)


def inspect_host(
    spec: SessionSpec,
    work: WorkDir,
    *,
    features: HostFeatures,
    programs: Programs,
    own: SessionId,
) -> HostSetting:
    """Inspect the host once, for every network shape.

    Raises if a path of the caller is missing or refused.
    """
    isolated = spec.backend != "none"
    own_everything = work.is_private and not spec.read_write_paths and features.own_id
    idmap = features.idmap and spec.backend not in HOST_ROOT  # no mount, no mapped one
    identity = _identity(own, isolated=isolated, idmap=idmap, own_everything=own_everything)
    mapper = _Mapper(identity, idmap=idmap)
    try:
        return _inspect_host(
            spec,
            work,
            features=features,
            programs=programs,
            identity=identity,
            mapper=mapper,
        )
    except BaseException:
        mapper.close()
        raise


def _inspect_host(
    spec: SessionSpec,
    work: WorkDir,
    *,
    features: HostFeatures,
    programs: Programs,
    identity: Identity,
    mapper: _Mapper,
) -> HostSetting:
    isolated = spec.backend != "none"
    if identity.kind == "unprivileged" and not mapper.enabled:
        work.chown(identity.host_uid, identity.host_gid)
    python = host.interpreter()
    host_env, ca_paths = host.ca_environment()
    binds, links = host.system_view()
    places = programs.places
    added = [
        *owner_paths(python, programs, isolated=isolated),
        *ca_files(ca_paths, places),
    ]
    added.append(host.uv_shown(programs.uv))
    gpus = _gpus(spec, identity, places)
    added += gpus.libraries
    if gpus.library_path:
        host_env["LD_LIBRARY_PATH"] = ":".join(gpus.library_path)
    for item, owner in named_paths(spec, work, places):
        # Without its identity, a replacement on a file system without id-mapped mounts would
        # disable them for the session.
        is_unchecked = mapper.enabled and item.identity == (0, 0)
        found = (owner.st_dev, owner.st_ino) if is_unchecked else item.identity
        pinned = dataclasses.replace(item, identity=found)
        added.append(mapper.mapped(pinned, (owner.st_uid, owner.st_gid)))
    if work.is_renamed and isolated:
        _refuse_name(work.path, [one.path for one in (*binds, *added)])
    own = Shown(
        source=work.source,
        path=work.path,
        writable=True,
        identity=work.identity,
        is_private=work.is_private,
    )
    added.append(mapper.mapped(own, work.owner))
    on_host_root = isolated and spec.backend in HOST_ROOT
    if on_host_root:
        if identity.kind == "caller" and work.is_private:
            work.chown(identity.host_uid, identity.host_gid)  # an earlier attempt gave it away
        added += _host_root.scratch_paths(work, identity)
        binds = (*binds, *_host_root.etc_files())
    files = [
        ("/etc/passwd", _passwd(identity, work.path)),
        ("/etc/group", f"root:x:0:\nsandbox:x:{identity.gid}:\nnogroup:x:65534:\n".encode()),
        ("/etc/nsswitch.conf", _NSSWITCH),
        (_HOSTS_FILE, _HOSTS),
        (_RESOLVER_FILE, resolv_conf("blocked")),
    ]
    read_only = ReadOnlyPaths()
    shown = deduplicated(added)
    if on_host_root:
        _host_root.check(spec, shown)
    elif isolated:
        if not features.kernel.read_only_metadata and identity.kind == "caller":
            refuse_on_tmpfs(shown, uid=identity.host_uid)
        try:
            shown = read_only.protect(shown, strict=spec.strict)
        except BaseException:
            read_only.close()
            raise
    named = {item.path for item in shown}  # replaces a file of ours, in every network shape
    name_files = name_files_now()
    return HostSetting(
        identity=identity,
        view=View(
            system=binds,
            links=links,
            files=tuple(file for file in files if file[0] not in named),
            network_files=tuple(file for file in _network_files() if file.path not in named),
            added=tuple(shown),
            work_dir=work.path,
            fresh_proc=features.fresh_proc,
            guarded_proc=guarded_proc(identity),
            hidden_proc=hidden_proc(identity),
            staging=next(p for p in _WORK_MOUNT_POINTS if os.path.isdir(p)),
            pivot=features.pivot,
            tmp_bytes=spec.limits.tmp_bytes,
            shm_bytes=spec.limits.shm_bytes,
            nodes=gpus.nodes,
            machine=spec.persist == "machine",
            counters=counters(identity) if features.counters and features.fresh_proc else (),
            mount_points=() if features.kernel.mount_trees else tuple(host.mount_points()),
        ),
        fds=mapper.fds,
        host_env=host_env,
        python=python,
        read_only=read_only,
        name_files=name_files,
    )


def named_paths(
    spec: SessionSpec, work: WorkDir, places: Places
) -> Iterator[tuple[Shown, os.stat_result]]:
    """Yield the caller's paths, resolved. Raises for one that is missing or refused."""
    for argument, paths, writable in (
        ("read_only_paths", spec.read_only_paths, False),
        ("read_write_paths", spec.read_write_paths, True),
    ):
        for path in paths:
            item, owner = _named(path, work, places, writable=writable, argument=argument)
            _refuse_overlap(item, work, argument)
            yield item, owner


def _gpus(spec: SessionSpec, identity: Identity, places: Places) -> gpu.Gpus:
    if not spec.limits.gpus:
        return gpu.Gpus()
    return gpu.find(
        spec.limits.gpus,
        for_everybody=identity.kind == "unprivileged",
        environ={"LD_LIBRARY_PATH": _safe_library_path(places)},
    )


def _safe_library_path(places: Places) -> str:
    """Return the directories of LD_LIBRARY_PATH that sandboxed code cannot write."""
    return ":".join(
        path
        for path in os.environ.get("LD_LIBRARY_PATH", "").split(":")
        if os.path.isabs(path) and _is_safe(path, places)
    )


def _is_safe(path: str, places: Places) -> bool:
    try:
        with pin(path, places) as found:
            return not found.is_writable_place
    except OSError:
        return False


def ca_files(paths: dict[str, str], places: Places) -> Iterator[Shown]:
    """Yield the paths in variables such as SSL_CERT_FILE, checked like ``read_only_paths``."""
    for path, variable in paths.items():
        try:
            yield host.pinned(path, places, argument=variable)[0]
        except LinkInWritablePlaceError as exc:
            raise _through_link(path, variable, exc) from exc
        except SandboxUsageError:
            continue  # it does not exist, or the caller cannot read it either


def deduplicated(added: list[Shown]) -> list[Shown]:
    """Keep the last of several at one path: a caller's path replaces the interpreter's."""
    return list({item.path: item for item in added}.values())


def name_files_now() -> tuple[tuple[int, int] | None, ...]:
    """Return the identities of the host's files for name lookups; None for one that is missing."""
    return tuple(map(_identity_now, (_HOSTS_FILE, _RESOLVER_FILE)))


def _identity_now(path: str) -> tuple[int, int] | None:
    try:
        return identity_of(os.stat(path))
    except OSError:
        return None


def _network_files() -> list[NetworkFile]:
    """Return the files that differ by network shape."""
    return [
        NetworkFile(network="filtered", path=_RESOLVER_FILE, content=resolv_conf("filtered")),
        *(
            NetworkFile(network="open", path=path, source=os.path.realpath(path))
            for path in (_HOSTS_FILE, _RESOLVER_FILE)
            if os.path.exists(path)
        ),
    ]


def _passwd(identity: Identity, home: str) -> bytes:
    lines = (
        "root:x:0:0:root:/nonexistent:/usr/sbin/nologin",
        f"sandbox:x:{identity.uid}:{identity.gid}:sandbox:{home}:/bin/sh",
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin",
    )
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape")


def _named(
    path: str, work: WorkDir, places: Places, *, writable: bool, argument: str
) -> tuple[Shown, os.stat_result]:
    """Resolve a path of the caller without following links that sandboxed code may have made.

    On a server, whose clients may name few paths, the mount must have the identity that was
    checked here.
    """
    try:
        item, found = host.pinned(path, places, writable=writable, argument=argument)
    except LinkInWritablePlaceError as exc:
        if work.allowed is not None:
            raise not_allowed(
                argument, path
            ) from exc  # the target of the link is not shown to a client
        raise _through_link(path, argument, exc) from exc
    work.check_allowed(path, item.source, argument)
    if work.allowed is not None:
        item = dataclasses.replace(item, identity=identity_of(found))
    return item, found


def _through_link(path: str, argument: str, exc: LinkInWritablePlaceError) -> PolicyError:
    return PolicyError(
        f"{argument}: {path} leads through a link in the work dir, or in another directory that "
        f"sandboxed code can write: {exc.link} -> {exc.target}",
        argument=argument,
        hint="sandboxed code may have created the link; pass a path without one",
    )


def _refuse_name(name: str, shown: Iterable[str]) -> None:
    for path in shown:
        if f"{path}/".startswith(f"{name}/") or name.startswith(f"{path}/"):
            raise PolicyError(
                f"work_dir_name={name!r} overlaps {path}, which the sandbox shows",
                argument="work_dir_name",
                hint="choose a name outside of it",
            )


def _refuse_overlap(item: Shown, work: WorkDir, argument: str) -> None:
    for path in (item.path, item.source):
        if path == "/" or path in {"/proc", "/sys", "/dev", "/run", "/etc"}:
            raise PolicyError(
                f"{argument}: {path} cannot be made visible in a sandbox",
                argument=argument,
                hint="pass the files or directories below it that are needed",
            )
    if work.path == item.path or work.path.startswith(item.path + "/"):
        raise PolicyError(
            f"{argument}: {item.path} contains the work dir {work.path}",
            argument=argument,
            hint="pass the directories beside the work dir that are needed",
        )


def _epoll_limit(identity: Identity) -> str:
    if identity.kind == "unprivileged":
        return "namespace"  # the kernel counts them for the session's own id
    return "watch" if identity.kind == "caller" and epoll_watches.max_watches() else "none"


def limit_report(
    limits: Limits,
    identity: Identity,
    where: cgroup.Hierarchy | None,
    *,
    shared: bool,
    counted: bool,
    own_count: bool = True,
    on_host_root: bool = False,
) -> dict[str, str]:
    """Return the mechanism that enforces each limit on this host.

    Args:
        limits: the limits of the session.
        identity: the identity of its sandboxes.
        where: the cgroup hierarchy, if control groups are used.
        shared: the sandboxes share a user namespace above their own.
        counted: that namespace, or a host id of the session's own, limits kernel counters.
        own_count: the kernel counts the processes of one user namespace by themselves.
        on_host_root: the sandboxes have no namespace. Default: False.

    """
    group = f"cgroup-v{where.version}" if where else ""
    has_cpu = where is not None and "cpu" in where.controllers
    has_pids = where is not None and "pids" in where.controllers
    isolated = identity.kind != "host"
    # A per-user limit counts only the sandbox in its own user namespace, and the kernel exempts
    # the host's root from it.
    by_user = isolated and identity.host_uid != 0
    # A session with an id of its own shares the count with no other.
    own = own_count or identity.kind == "unprivileged"
    by_id = "rlimit" if own else "rlimit-shared"
    scratch = "tmpfs" if isolated and not on_host_root else "none"
    report = {
        "processes": by_id if by_user else group if has_pids else "none",
        "session_processes": by_id if by_user and shared else "none",
        "open_files": "rlimit",
        "file_size": "rlimit",
        "tmp": scratch,
        "shm": scratch,
        "core": "rlimit" if inherited.can_stop_core_dumps() else "none",
        "inotify": "filter" if on_host_root else "namespace" if counted else "none",
        "epoll": _epoll_limit(identity),
    }
    if limits.memory_bytes is not None:
        report["memory"] = group or "watch"
    if limits.cpus is not None:
        report["cpu"] = group if has_cpu else "none"
    if limits.gpus:
        report["gpu"] = "nodes"
    if limits.disk_bytes is not None:
        report["disk"] = "tmpfs"  # the session does not open without it
    return report
