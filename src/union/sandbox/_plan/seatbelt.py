"""The profile for ``sandbox-exec`` of macOS, and the command line that uses it. No I/O.

A profile is a list of rules in a Lisp-like language with default deny. Paths must be resolved: the
kernel compares them after following links, and on macOS /tmp, /var and /etc are links into
/private.
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
"""Links into /private; allowing them does not make their targets visible."""
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
    """Return the command line that runs ``argv`` under the profile in a file."""
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
    """Return the profile of one posture.

    Args:
        work_dir: the work dir, writable.
        scratch: a writable directory in place of /tmp, which cannot be private here.
        read_only: further readable paths.
        read_write: further writable paths. Default: none.
        network: ``blocked`` (nothing, loopback included), ``open``, or ``filtered`` (only
            ``proxy_ports``).
        proxy_ports: loopback ports of our proxies, which also resolve names. Default: none.

    """
    writable = (work_dir, scratch, *read_write)
    readable = (*_SYSTEM, *read_only)
    shown = (*readable, *writable, *_SYSTEM_FILES, *_READ_DEVICES)
    blocks = [
        "(version 1)",
        "(deny default)",
        # These are exempt from the default deny, so they are denied by name.
        "(deny process-info* nvram* iokit-get-properties)",
        "(allow process-exec process-fork)",
        "(allow signal process-info* (target same-sandbox))",
        "(allow sysctl-read ipc-posix-sem)",
        _rule("mach-lookup", _named("global-name", _SERVICES)),
        # Resolving a path needs metadata of its parent directories, not their entries.
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
        proxies = [f'(remote ip "localhost:{int(port)}")' for port in proxy_ports]
        return [_rule("network-outbound", proxies)]
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
    """Quote a string for a profile; refuse characters that may be unsafe in it."""
    if not text.isprintable():
        raise PolicyError(
            f"{text!r} contains characters that a sandbox-exec profile cannot hold",
            hint="use a path without control characters",
        )
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
