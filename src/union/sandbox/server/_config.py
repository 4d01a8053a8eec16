"""What a server is told when it starts: checked once, then only read."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from union.sandbox._backends import registry
from union.sandbox._core.resolve import resolve_session, validate_timeout
from union.sandbox._policy.upstream import parse_allowed_proxies
from union.sandbox.errors import SandboxUsageError
from union.sandbox.server._auth import Verifier
from union.sandbox.server._secret_files import read_secret

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

    from union.sandbox._core.spec import NetworkSpec
    from union.sandbox._policy.policy import Entry
    from union.sandbox.server._auth import Guest
    from union.sandbox.server._supervised import FixedSession

__all__ = ["TOKEN_VARIABLE", "Bind", "Config", "config_from_arguments"]

TOKEN_VARIABLE: Final = "SANDBOX_SERVER_TOKEN"  # noqa: S105 - the name, not the token
VERIFIER_VARIABLE: Final = "SANDBOX_SERVER_TOKEN_SHA256"
DEFAULT_WORK_DIR: Final = "/tmp/sandbox-work"  # noqa: S108 - made private, see _sessions
_LEAST_TOKEN: Final = 16


@dataclass(frozen=True, slots=True)
class Bind:
    """One place to listen at: a host and a port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_local(self) -> bool:
        """Only this machine can reach it."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One server."""

    binds: tuple[Bind, ...]
    verifier: Verifier | None = None
    """How a token is recognised; None: none is asked for."""
    backends: tuple[str, ...] = ("userns",)
    """The first is the default, the others may be asked for."""
    work_dir: str = DEFAULT_WORK_DIR
    allow_paths: tuple[str, ...] = ()
    """What clients may show to their sandboxes, or pin as a work dir: these, and below them."""
    allow_hosts: tuple[str, ...] = ()
    """Names besides its addresses by which the server may be called."""
    ceiling: NetworkSpec
    allow_proxies: tuple[Entry, ...] = ()
    """Upstream proxies that clients may name for their sessions."""
    max_sessions: int = 64
    max_runs: int = 256
    max_connections: int = 512
    max_buffer_bytes: int = 256 * 1024 * 1024
    """What is kept of all runs together before each of them gets less room."""
    max_session_s: float | None = None
    """The most time a session may have, whatever its client asked for."""
    grace_s: float = 30.0
    drain_s: float = 30.0
    header_timeout_s: float = 10.0
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_self_signed: bool = False
    log_level: str = "info"
    supervised: bool = False
    """Whether the session and its tokens come through stdin (``_supervised.py``)."""
    guest: Guest | None = None
    fixed: FixedSession | None = None
    """The one session there is; None: clients open their own."""
    line: socket.socket | None = None
    """To whoever started this server, who made it."""

    @property
    def is_tls(self) -> bool:
        return self.tls_self_signed or self.tls_cert is not None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sandbox-server",
        description="Sandbox sessions for remote clients. "
        f"The token comes from --token-file, or from the variable {TOKEN_VARIABLE}.",
        epilog="SIGTERM: no new sessions or runs; those that run may end; then the server does.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--bind",
        action="append",
        metavar="HOST:PORT|unix:PATH",
        help="where to listen; may be repeated (default 127.0.0.1:8080); port 0 picks one",
    )
    add("--token-file", metavar="FILE", help="a file that holds the token")
    add(
        "--token-sha256-file",
        metavar="FILE",
        help="a file that holds the SHA-256 of the token, in hexadecimal, instead of the token",
    )
    add(
        "--backend",
        action="append",
        choices=registry.NAMES,
        help="a backend that clients may use; the first is the default (userns)",
    )
    add(
        "--work-dir",
        default=DEFAULT_WORK_DIR,
        metavar="DIR",
        help="where work dirs are made, and where each session sees its own (%(default)s)",
    )
    add(
        "--allow-path",
        action="append",
        default=[],
        metavar="PATH",
        help="a path of this machine that clients may show to sandboxes; may be repeated",
    )
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a DNS name by which clients call this server; may be repeated",
    )
    add(
        "--network-mode",
        choices=("blocked", "allowlist", "open"),
        default="open",
        help="the most that a session may have (%(default)s)",
    )
    add(
        "--network-allow",
        action="append",
        metavar="ENTRY",
        help="with --network-mode allowlist: what a session's own list may hold at most",
    )
    add(
        "--allow-proxy",
        action="append",
        default=[],
        metavar="URL|HOST[:PORT]",
        help="an upstream proxy that clients may name; one on an internal network must be named "
        "by its address as well; may be repeated (none)",
    )
    add("--max-sessions", type=int, default=64, metavar="N", help="(%(default)s)")
    add(
        "--max-runs",
        type=int,
        default=256,
        metavar="N",
        help="commands at once, shared by the sessions (%(default)s)",
    )
    add("--max-connections", type=int, default=512, metavar="N", help="(%(default)s)")
    add(
        "--max-buffer-mib",
        type=int,
        default=256,
        metavar="N",
        help="unread output of all runs that is kept (%(default)s)",
    )
    add(
        "--max-session-s",
        type=float,
        metavar="S",
        help="how long a session may last, also where its client asks for more (no limit)",
    )
    add(
        "--grace",
        type=float,
        default=30.0,
        metavar="S",
        help="how long a session waits for a client that it does not hear from (%(default)s)",
    )
    add(
        "--drain",
        type=float,
        default=30.0,
        metavar="S",
        help="how long commands may go on after SIGTERM (%(default)s)",
    )
    add(
        "--header-timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="how long a new connection may take to ask for something (%(default)s)",
    )
    add("--tls-cert", metavar="FILE", help="certificate chain, PEM")
    add("--tls-key", metavar="FILE", help="its private key, PEM")
    add(
        "--tls-self-signed",
        action="store_true",
        help="make a certificate for this run; clients pin its fingerprint",
    )
    add(
        "--supervised",
        action="store_true",
        help="one session, which the first line of stdin describes; ends when stdin does",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser  # fmt: skip


def config_from_arguments(argv: Sequence[str] | None, environ: Mapping[str, str]) -> Config:
    """Reads the command line; raises ``SandboxUsageError`` for what makes no sense together."""
    told = _parser().parse_args(argv)
    backends = tuple(dict.fromkeys(told.backend or ["userns"]))
    ceiling = resolve_session(
        backend=backends[0],
        backends=registry.NAMES,
        network_mode=told.network_mode,
        network_allowlist=told.network_allow,
    ).network
    config = Config(
        binds=tuple(_bind(text) for text in told.bind or ["127.0.0.1:8080"]),
        verifier=_verifier(told.token_file, told.token_sha256_file, environ),
        backends=backends,
        work_dir=_absolute("--work-dir", told.work_dir),
        allow_paths=tuple(_absolute("--allow-path", path) for path in told.allow_path),
        allow_hosts=tuple(name.lower().rstrip(".") for name in told.allow_host),
        ceiling=ceiling,
        allow_proxies=parse_allowed_proxies(told.allow_proxy, argument="--allow-proxy"),
        max_sessions=_count("--max-sessions", told.max_sessions),
        max_runs=_count("--max-runs", told.max_runs),
        max_connections=_count("--max-connections", told.max_connections),
        max_buffer_bytes=_count("--max-buffer-mib", told.max_buffer_mib) * 1024 * 1024,
        max_session_s=validate_timeout("--max-session-s", told.max_session_s),
        grace_s=validate_timeout("--grace", told.grace) or 0.0,
        header_timeout_s=validate_timeout("--header-timeout", told.header_timeout) or 0.0,
        drain_s=validate_timeout("--drain", told.drain) or 0.0,
        tls_cert=told.tls_cert,
        tls_key=told.tls_key,
        tls_self_signed=told.tls_self_signed,
        log_level=told.log_level,
        supervised=told.supervised,
    )
    _check_together(config)
    return config


def _check_together(config: Config) -> None:
    if config.supervised and config.verifier is not None:
        raise SandboxUsageError(
            "--supervised brings its own tokens, and there is another one", argument="--supervised"
        )
    if config.verifier is None and not config.supervised:
        for bind in config.binds:
            if not bind.is_local:
                raise SandboxUsageError(
                    f"--bind {bind} can be reached from other machines, and there is no token",
                    argument="--bind",
                    hint=f"use --token-file, or set {TOKEN_VARIABLE}; or bind to 127.0.0.1 or "
                    "to unix:PATH",
                )
    if (config.tls_cert is None) != (config.tls_key is None):
        raise SandboxUsageError("--tls-cert and --tls-key go together", argument="--tls-cert")
    if config.tls_self_signed and config.tls_cert is not None:
        raise SandboxUsageError(
            "--tls-self-signed makes a certificate; there is one in --tls-cert",
            argument="--tls-self-signed",
        )


def _count(argument: str, value: int) -> int:
    if value < 1:
        raise SandboxUsageError(f"{argument} must be at least 1, not {value}", argument=argument)
    return value


def _absolute(argument: str, path: str) -> str:
    if not path.startswith("/"):
        raise SandboxUsageError(
            f"{argument} must be an absolute path, not {path!r}", argument=argument
        )
    return os.path.normpath(path)


def _bind(text: str) -> Bind:
    if text.startswith("unix:"):
        return Bind(path=_absolute("--bind", text.removeprefix("unix:").removeprefix("//")))
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise SandboxUsageError(
            f"--bind must be HOST:PORT or unix:PATH, not {text!r}",
            argument="--bind",
            hint="for example 127.0.0.1:8080, [::1]:8080 or unix:/run/sandbox.sock",
        )
    return Bind(host=host.removeprefix("[").removesuffix("]"), port=int(port))


def _verifier(
    token_file: str | None, digest_file: str | None, environ: Mapping[str, str]
) -> Verifier | None:
    """The one place that the token comes from; two of them would leave open which one counts."""
    given = {
        "--token-file": token_file,
        "--token-sha256-file": digest_file,
        TOKEN_VARIABLE: environ.get(TOKEN_VARIABLE),
        VERIFIER_VARIABLE: environ.get(VERIFIER_VARIABLE),
    }
    named = [name for name, value in given.items() if value is not None]
    if not named:
        return None
    if len(named) > 1:
        raise SandboxUsageError(f"{named[0]} and {named[1]} are both set", argument=named[0])
    source = named[0]
    is_digest = source in {"--token-sha256-file", VERIFIER_VARIABLE}
    if token_file is not None or digest_file is not None:
        secret = read_secret(source, token_file or digest_file or "", is_secret=not is_digest)
    else:
        secret = given[source] or ""
    # One line end belongs to the file, also one of Windows; the rest is the token.
    secret = secret.removesuffix("\n").removesuffix("\r")
    if is_digest:
        return Verifier.from_digest(secret.strip(), argument=source)
    if secret != secret.strip() or not secret.isprintable():
        raise SandboxUsageError(
            f"the token in {source} holds white space at an end, more than one line, or a control "
            "character, which cannot be sent in a header",
            argument=source,
            hint="write it as one line: printf '%s' TOKEN > FILE",
        )
    if len(secret) < _LEAST_TOKEN or not secret.isascii():
        raise SandboxUsageError(
            f"the token in {source} must be at least {_LEAST_TOKEN} printable ASCII characters",
            argument=source,
            hint="make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return Verifier.from_token(secret)
