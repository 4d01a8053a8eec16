"""The profile for ``sandbox-exec`` of macOS, and the command line that uses it. No I/O.

A profile is a list of rules in a Lisp-like language; what no rule allows is denied. The text holds
no value of the caller: every path and the label are parameters (``-D``), and ports are numbers. No
path can add a rule, therefore, and one text serves every session of the same shape.

Paths must be real paths: the kernel compares them after following links, and on macOS /tmp, /var
and /etc are links into /private.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from union.sandbox.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["PROGRAM", "Profile", "command", "profile"]

PROGRAM: Final = "/usr/bin/sandbox-exec"

_SYSTEM: Final = (
    "/System/Library",
    "/System/Cryptexes",  # the loader's cache, since macOS 13
    "/System/Volumes/Preboot/Cryptexes",
    "/usr",
    "/bin",  # not a link into /usr on macOS
    "/sbin",
    "/Library/Apple",
    "/private/var/db/dyld",
    "/private/var/db/timezone",
    "/private/var/select",  # /bin/sh reads here which shell it is
    "/private/etc/ssl",
)
_SYSTEM_FILES: Final = (
    "/",  # read by the loader; without it every program aborts before main()
    "/private/etc/gitconfig",  # git fails if access is refused, but not if the file is missing
    "/private/etc/group",
    "/private/etc/localtime",
    "/private/etc/passwd",
    "/private/etc/protocols",
    "/private/etc/services",
    "/private/etc/shells",
    "/private/var/db/xcode_select_link",
)
_LINKS: Final = ("/etc", "/tmp", "/var")  # noqa: S108 - names on macOS
"""Links into /private; their targets are not visible by this."""
_READ_DEVICES: Final = (
    "/dev/autofs_nowait",
    "/dev/dtracehelper",
    "/dev/null",
    "/dev/random",
    "/dev/urandom",
    "/dev/zero",
)
_WRITE_DEVICES: Final = ("/dev/dtracehelper", "/dev/null", "/dev/zero")
_SYSCTLS: Final = (
    "kern.argmax",
    "kern.hostname",
    "kern.iossupportversion",
    "kern.maxfilesperproc",
    "kern.maxproc",
    "kern.ngroups",
    "kern.osproductversion",
    "kern.osrelease",
    "kern.ostype",
    "kern.osvariant_status",
    "kern.osversion",
    "kern.secure_kernel",
    "kern.sysv.semmns",  # sysconf(_SC_SEM_NSEMS_MAX), of Python's process pools
    "kern.usrstack64",
    "kern.version",
    "security.mac.lockdown_mode_state",
    "sysctl.proc_cputype",
    "vm.loadavg",
    "vm.swapusage",
)
"""Named one by one: ``kern.procargs2`` shows the environment of the caller's other programs."""
_SYSCTL_PREFIXES: Final = ("hw.", "kern.proc.pgrp.", "kern.proc.pid.", "machdep.cpu.")
_SERVICES: Final = (
    "com.apple.SystemConfiguration.configd",  # uv panics if it cannot query the proxies
    "com.apple.bsd.dirhelper",
    "com.apple.logd",
    "com.apple.system.logger",
    "com.apple.system.notification_center",
    "com.apple.system.opendirectoryd.libinfo",
    "com.apple.system.opendirectoryd.membership",
)
"""Without LaunchServices, AppleEvents, the keychain, preferences, the pasteboard and windows."""
_NETWORK_SERVICES: Final = (
    "com.apple.SystemConfiguration.DNSConfiguration",
    "com.apple.dnssd.service",
    "com.apple.networkd",
    "com.apple.trustd",
    "com.apple.trustd.agent",
)
_NETWORK_FILES: Final = (
    "/private/etc/hosts",
    "/private/etc/resolv.conf",
    "/private/var/run/resolv.conf",
)
_RESOLVER: Final = "/private/var/run/mDNSResponder"
_SHM_PREFIXES: Final = ("/psm_", "/torch_", "/__KMP_REGISTERED_LIB_", "/loky-")
_KEPT: Final = "file-read* file-write* file-link file-clone file-map-executable"
_OPEN_BY_DEFAULT: Final = (
    "file-clone",  # copies a file that cannot be read
    "file-link",
    "file-test-existence",
    "iokit-get-properties",
    "mach-cross-domain-lookup",
    "nvram*",
    "process-info*",
    "socket-ioctl",
)
"""Allowed by a profile of version 1 unless denied by name. Not every release knows all of them."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The rules, and the values of their parameters."""

    text: str
    parameters: dict[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Identifies the rules, without their parameters."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def command(profile_path: str, parameters: dict[str, str]) -> tuple[str, ...]:
    """Return the arguments that precede those of a program to run it under a profile."""
    given = [word for name, value in parameters.items() for word in ("-D", f"{name}={value}")]
    return (PROGRAM, "-f", profile_path, *given, "--")


def profile(
    *,
    label: str,
    work_dir: str,
    tmp: str,
    read_only: Iterable[str] = (),
    read_only_files: Iterable[str] = (),
    read_write: Iterable[str] = (),
    network: str,
    proxy_ports: Sequence[int] = (),
    terminal: str | None = None,
    imports: Iterable[str] = (),
) -> Profile:
    """Return the profile of one run.

    Args:
        label: a name that no service has. Only this run may look it up, so its processes can be
            distinguished from all others. The log shows it with each refusal.
        work_dir: the work dir, writable.
        tmp: a writable directory in place of /tmp, which cannot be private here.
        read_only: readable directories. Default: none.
        read_only_files: readable files. Default: none.
        read_write: further writable paths. Default: none.
        network: ``blocked`` (nothing, loopback included), ``open``, or ``filtered`` (only
            ``proxy_ports``).
        proxy_ports: loopback ports of the run's proxies, which also resolve names. Default: none.
        terminal: the device of the command's terminal. Default: none.
        imports: profiles of the system to include. Default: none.

    Raises:
        PolicyError: a path is not absolute and normal, or cannot be a parameter.

    """
    given = _Parameters()
    own = [given.path("WORK", work_dir), given.path("TMP", tmp)]
    own += given.paths("RW", read_write)
    shown = given.paths("RO", read_only)
    files = given.paths("ROF", read_only_files)
    above = given.paths("UP", _above(given.values(but="LABEL")))
    name = given.add("LABEL", label)
    programs = [*_named("subpath", _SYSTEM), *_of("subpath", shown)]
    kept = _of("subpath", own)
    blocks = [
        "(version 1)",
        f"(deny default (with message {name}))",
        *(f'(import "{one}")' for one in imports),
        *(f"(when (defined? '{one}) (deny {one}))" for one in _OPEN_BY_DEFAULT),
        "(allow process-exec* process-fork)",
        "(allow signal process-info* (target self) (target same-sandbox))",
        _rule(
            "sysctl-read",
            [*_named("sysctl-name", _SYSCTLS), *_named("sysctl-name-prefix", _SYSCTL_PREFIXES)],
        ),
        _rule("mach-lookup", [*_named("global-name", _SERVICES), f"(global-name {name})"]),
        "(allow ipc-posix-sem)",
        _rule("ipc-posix-shm*", _named("ipc-posix-name-prefix", _SHM_PREFIXES)),
        _rule(
            "ipc-posix-shm-read-data", _named("ipc-posix-name", ("apple.shm.notification_center",))
        ),
        # Resolving a path needs metadata of its parent directories, not their entries.
        _rule(
            "file-read-metadata file-test-existence",
            [
                *_named("literal", (*_LINKS, "/dev", *_above((*_SYSTEM, *_SYSTEM_FILES)))),
                *_of("literal", above),
            ],
        ),
        _rule("file-read* file-map-executable", programs),
        _rule(
            "file-read*",
            [*_named("literal", (*_SYSTEM_FILES, *_READ_DEVICES)), *_of("literal", files)],
        ),
        _rule("file-read-data file-write-data", _named("subpath", ("/dev/fd",))),
        _rule("file-write-data file-ioctl", _named("literal", _WRITE_DEVICES)),
        _rule(_KEPT, kept),
        # An access list or a flag could prevent the removal of the work dir.
        _rule("file-write-acl file-write-flags file-write-setugid", kept, verb="deny"),
        # A Unix socket is matched by its path, under network operations.
        _rule("network-bind network-outbound network-inbound", kept),
        "(allow system-socket (socket-domain AF_UNIX))",
        # Terminals that a command creates itself, not those of the caller.
        "(allow pseudo-tty)",
        _rule("file-read* file-write* file-ioctl", _named("literal", ("/dev/ptmx",))),
        (
            "(allow file-read* file-write* file-ioctl\n"
            '  (require-all (regex #"^/dev/ttys[0-9]+$") (extension "com.apple.sandbox.pty")))'
        ),
        *_terminal(given, terminal),
        *_network(network, proxy_ports),
    ]
    return Profile("\n".join(blocks) + "\n", given.found)


def _terminal(given: _Parameters, device: str | None) -> list[str]:
    if device is None:
        return []
    name = given.path("TTY", device)
    filters = [f"(literal {name})", '(literal "/dev/tty")']
    return [_rule("file-read* file-write* file-ioctl", filters)]


def _network(shape: str, proxy_ports: Sequence[int]) -> list[str]:
    if shape == "open":
        return [
            "(allow network-outbound (remote ip))",
            "(allow network-bind network-inbound (local ip))",
            _rule("network-outbound", _named("literal", (_RESOLVER,))),
            (
                "(allow system-socket\n"
                "  (require-all (socket-domain AF_SYSTEM) (socket-protocol 2))\n"
                "  (socket-domain AF_ROUTE))"
            ),
            _rule("mach-lookup", _named("global-name", _NETWORK_SERVICES)),
            _rule("file-read*", _named("literal", _NETWORK_FILES)),
            _rule("sysctl-read", _named("sysctl-name-prefix", ("net.routetable.",))),
            "(when (defined? 'socket-ioctl) (allow socket-ioctl))",
        ]
    if shape == "filtered" and proxy_ports:
        # The language accepts no address here; this name stands for both loopback addresses.
        proxies = [f'(remote ip "localhost:{int(port)}")' for port in proxy_ports]
        services = ("com.apple.trustd", "com.apple.trustd.agent")
        return [
            _rule("network-outbound", proxies),
            _rule("mach-lookup", _named("global-name", services)),
        ]
    return []


class _Parameters:
    """Parameters by name; rules refer to the names."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def add(self, name: str, value: str) -> str:
        if "\0" in value or not value:
            raise PolicyError(
                f"{value!r} cannot be a parameter of a sandbox-exec profile",
                hint="use a path without NUL characters",
            )
        self.found[name] = value
        return f'(param "{name}")'

    def path(self, name: str, value: str) -> str:
        if not value.startswith("/") or value != "/".join(_parts(value)) or value == "/":
            raise PolicyError(
                f"{value!r} is not an absolute and normal path",
                hint="use a real path other than the root directory",
            )
        return self.add(name, value)

    def paths(self, prefix: str, values: Iterable[str]) -> list[str]:
        wanted = dict.fromkeys(value for value in values if value not in self.found.values())
        return [self.path(f"{prefix}{n}", value) for n, value in enumerate(wanted)]

    def values(self, *, but: str) -> list[str]:
        return [value for name, value in self.found.items() if name != but]


def _parts(path: str) -> list[str]:
    return ["", *(part for part in path.split("/") if part not in {"", ".", ".."})]


def _rule(operations: str, filters: Sequence[str], *, verb: str = "allow") -> str:
    if not filters:
        raise ValueError(f"({verb} {operations}) without a filter would apply to everything")
    return "\n  ".join((f"({verb} {operations}", *filters)) + ")"


def _named(kind: str, names: Iterable[str]) -> list[str]:
    return [f'({kind} "{name}")' for name in dict.fromkeys(names)]


def _of(kind: str, parameters: Iterable[str]) -> list[str]:
    return [f"({kind} {name})" for name in parameters]


def _above(paths: Iterable[str]) -> list[str]:
    found = set()
    for path in paths:
        parts = path.split("/")[1:-1]
        found |= {"/" + "/".join(parts[:n]) for n in range(1, len(parts) + 1)}
    return sorted(found)
