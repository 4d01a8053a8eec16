"""The profile for macOS's ``sandbox-exec``, and the command line that uses it. Pure.

A profile is a list of rules in a Lisp-like language; what no rule allows is denied. Paths must be
real ones: the kernel compares them after links are followed, and on macOS /tmp, /var and /etc are
links into /private.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from union.sandbox.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["PROGRAM", "command", "profile"]

PROGRAM: Final = "/usr/bin/sandbox-exec"

_SYSTEM: Final = (
    "/System",
    "/Library/Apple",
    "/bin",
    "/sbin",
    "/usr",
    "/private/etc/ssl",
    "/private/var/db/dyld",
    "/private/var/db/timezone",
)
_SYSTEM_FILES: Final = (
    "/private/etc/group",
    "/private/etc/hosts",
    "/private/etc/localtime",
    "/private/etc/passwd",
    "/private/etc/protocols",
    "/private/etc/services",
)
_LINKS: Final = ("/etc", "/tmp", "/var")  # noqa: S108 - names on macOS
"""They lead into /private; what they lead to is not shown by this."""
_READ_DEVICES: Final = ("/dev/null", "/dev/random", "/dev/urandom", "/dev/zero")
_WRITE_DEVICES: Final = ("/dev/null", "/dev/zero")
_SERVICES: Final = (
    "com.apple.system.logger",
    "com.apple.system.notification_center",
    "com.apple.system.opendirectoryd.libinfo",
)
_NAME_SERVICES: Final = (
    "com.apple.SystemConfiguration.configd",
    "com.apple.dnssd.service",
    "com.apple.trustd",
    "com.apple.trustd.agent",
)
_NAME_FILES: Final = ("/private/etc/resolv.conf", "/private/var/run/resolv.conf")


def command(profile_path: str, argv: Sequence[str]) -> tuple[str, ...]:
    """The argv that runs ``argv`` under the profile in a file."""
    return (PROGRAM, "-f", profile_path, "--", *argv)


def profile(
    *,
    work_dir: str,
    scratch: str,
    read_only: Iterable[str],
    read_write: Iterable[str] = (),
    network: str,
    proxy_ports: Sequence[int] = (),
) -> str:
    """The rules for one posture.

    ``scratch`` stands for /tmp, which cannot be a fresh one here. ``network`` is the shape:
    ``blocked`` (nothing, loopback included), ``open``, or ``filtered`` (only ``proxy_ports`` of the
    loopback, where our proxies listen; names are resolved by them).
    """
    writable = (work_dir, scratch, *read_write)
    readable = (*_SYSTEM, *read_only)
    shown = (*readable, *writable, *_SYSTEM_FILES, *_READ_DEVICES)
    blocks = [
        "(version 1)",
        "(deny default)",
        # These are allowed unless they are denied by name.
        "(deny process-info* nvram* iokit-get-properties)",
        "(allow process-exec process-fork)",
        "(allow signal process-info* (target same-sandbox))",
        "(allow sysctl-read ipc-posix-sem)",
        _rule("mach-lookup", _named("global-name", _SERVICES)),
        # To reach a path, what lies above it must be known to be there; not what else it holds.
        _rule("file-read-metadata", _named("literal", (*_LINKS, *_above(shown)))),
        _rule(
            "file-read*",
            [
                *_named("subpath", readable),
                *_named("literal", ("/", *_SYSTEM_FILES, *_READ_DEVICES)),
            ],
        ),
        _rule("file-read* file-write*", _named("subpath", writable)),
        _rule("file-write-data", _named("literal", _WRITE_DEVICES)),
        *_network(network, proxy_ports),
    ]
    return "\n".join(blocks) + "\n"


def _network(shape: str, proxy_ports: Sequence[int]) -> list[str]:
    if shape == "open":
        return [
            "(allow network* system-socket)",
            _rule("mach-lookup", _named("global-name", _NAME_SERVICES)),
            _rule("file-read*", _named("literal", _NAME_FILES)),
        ]
    if shape == "filtered" and proxy_ports:
        listeners = [f'(remote ip "localhost:{int(port)}")' for port in proxy_ports]
        return [_rule("network-outbound", listeners)]
    return ["(deny network*)"]


def _rule(operations: str, filters: Iterable[str]) -> str:
    return "\n  ".join((f"(allow {operations}", *filters)) + ")"


def _named(kind: str, names: Iterable[str]) -> list[str]:
    return [f"({kind} {_quoted(name)})" for name in dict.fromkeys(names)]


def _above(paths: Iterable[str]) -> list[str]:
    found = set()
    for path in paths:
        parts = path.split("/")[1:-1]
        found |= {"/" + "/".join(parts[:n]) for n in range(1, len(parts) + 1)}
    return sorted(found)


def _quoted(text: str) -> str:
    """A string of the language. What it cannot hold for sure is refused, not dropped."""
    if not text.isprintable():
        raise PolicyError(
            f"{text!r} cannot stand in a sandbox-exec profile",
            hint="use a path without control characters",
        )
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
