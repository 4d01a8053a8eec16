"""The configuration of a server: command line, environment, token files."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from union.sandbox._backends import registry
from union.sandbox._checkpoints.values import MAX_CHECKPOINTS
from union.sandbox._core.resolve import resolve_session, validate_timeout
from union.sandbox._policy.upstream import parse_allowed_proxies
from union.sandbox.errors import SandboxUsageError
from union.sandbox.server._auth import Verifier
from union.sandbox.server._secret_files import read_secret
from union.sandbox.server._stored_secrets import read_stored_secrets

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

    from union.sandbox._core.spec import NetworkSpec
    from union.sandbox._policy.rules import Entry
    from union.sandbox._policy.stored_secrets import StoredSecret
    from union.sandbox._wire.launch import LaunchSpec
    from union.sandbox.server._auth import Guest

__all__ = ["TOKEN_VARIABLE", "Bind", "Config", "config_from_arguments"]

TOKEN_VARIABLE: Final = "SANDBOX_SERVER_TOKEN"  # noqa: S105 - the name, not the token
VERIFIER_VARIABLE: Final = "SANDBOX_SERVER_TOKEN_SHA256"
DEFAULT_WORK_DIR: Final = "/tmp/sandbox-work"  # noqa: S108 - made private, see _sessions
_MIN_TOKEN_CHARS: Final = 16


@dataclass(frozen=True, slots=True)
class Bind:
    """One listening address: a host and a port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
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
    """The settings of one server."""

    binds: tuple[Bind, ...]
    verifier: Verifier | None = None
    scraper: Verifier | None = None
    """The token that only reads metrics."""
    """Checks tokens; None: no token is required."""
    backends: tuple[str, ...] = ("userns",)
    """Backends that clients may use; the first is the default."""
    work_dir: str = DEFAULT_WORK_DIR
    allow_paths: tuple[str, ...] = ()
    """Paths that clients may mount into sandboxes or use as work dirs, and everything below."""
    mcp: Bind | None = None
    """Where MCP clients connect; None: nowhere."""
    mcp_allow: tuple[str, ...] = ()
    """Hosts that the sandboxes of MCP clients may reach, within the ceiling."""
    allow_hosts: tuple[str, ...] = ()
    """Accepted names in the Host header, besides the server's addresses."""
    ceiling: NetworkSpec
    allow_proxies: tuple[Entry, ...] = ()
    """Upstream proxies that clients may use for their sessions."""
    secrets: Mapping[str, StoredSecret] = field(default_factory=dict, repr=False)
    """Credentials that clients use by name, and cannot read."""
    preload: tuple[str, ...] = ()
    """Modules that templates may import; those of a session that names none itself."""
    max_sessions: int = 64
    max_runs: int = 256
    max_connections: int = 512
    max_buffer_bytes: int = 256 * 1024 * 1024
    """Unread output that is kept for all runs before each of them gets less room."""
    max_snapshots: int = 100
    """Checkpoints that one session may keep."""
    max_snapshot_bytes: int = 10 * 1024**3
    """Bytes on disk that the checkpoints of one session may take."""
    max_session_s: float | None = None
    """Longest duration of a session; a longer timeout of a client is reduced to it."""
    grace_s: float = 30.0
    drain_s: float = 30.0
    header_timeout_s: float = 10.0
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_self_signed: bool = False
    log_level: str = "info"
    supervised: bool = False
    """Whether stdin holds a launch document (``_supervised.py``)."""
    guest: Guest | None = None
    launch: LaunchSpec | None = None
    """The one session of a supervised server; None: clients open their own."""
    owner_socket: socket.socket | None = None
    """A connected socket to the process that started this server."""

    @property
    def is_tls(self) -> bool:
        return self.tls_self_signed or self.tls_cert is not None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sandbox-server",
        description="Serve sandbox sessions to remote clients. "
        f"The token is read from --token-file or from the variable {TOKEN_VARIABLE}.",
        epilog="On SIGTERM the server refuses new sessions and runs, waits for running commands "
        "(--drain) and exits. A second SIGTERM exits at once.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--bind",
        action="append",
        metavar="HOST:PORT|unix:PATH",
        help="address to listen on; port 0 selects a free port; may be repeated "
        "(default: 127.0.0.1:8080)",
    )
    add(
        "--mcp",
        metavar="HOST:PORT",
        help="also serve MCP clients, at http://HOST:PORT/mcp; their bearer token is that of the "
        "server; needs the extra mcp (default: no)",
    )
    add(
        "--mcp-allow",
        action="append",
        default=[],
        metavar="ENTRY",
        help="host that the sandboxes of MCP clients may reach; may be repeated (default: none)",
    )
    add("--token-file", metavar="FILE", help="file with the token")
    add(
        "--metrics-token-file",
        metavar="FILE",
        help="file with a second token, which can only read /v1/metrics",
    )
    add(
        "--token-sha256-file",
        metavar="FILE",
        help="file with the SHA-256 of the token in hexadecimal, instead of the token",
    )
    add(
        "--backend",
        action="append",
        choices=registry.NAMES,
        help="backend that clients may use; the first one is their default; may be repeated "
        "(default: userns)",
    )
    add(
        "--work-dir",
        default=DEFAULT_WORK_DIR,
        metavar="DIR",
        help="directory for the work dirs, and path of the work dir inside each sandbox "
        "(default: %(default)s)",
    )
    add(
        "--allow-path",
        action="append",
        default=[],
        metavar="PATH",
        help="host path that clients may mount into sandboxes; may be repeated (default: none)",
    )
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="DNS name of this server that is accepted in the Host header; may be repeated",
    )
    add(
        "--network-mode",
        choices=("blocked", "allowlist", "open"),
        default="open",
        help="most permissive network mode that a session may use (default: %(default)s)",
    )
    add(
        "--network-allow",
        action="append",
        metavar="ENTRY",
        help="with --network-mode allowlist: host that sessions may allow; may be repeated",
    )
    add(
        "--allow-proxy",
        action="append",
        default=[],
        metavar="URL|HOST[:PORT]",
        help="upstream proxy that clients may use; for one on an internal network also give its "
        "address; may be repeated (default: none)",
    )
    add(
        "--secrets",
        metavar="FILE",
        help="file (TOML) with credentials that clients use by name and cannot read; only this "
        "user may have access to it (default: none)",
    )
    add(
        "--preload",
        action="append",
        default=[],
        metavar="MODULE",
        help="module that is imported ahead for Python commands and contexts; may be repeated "
        "(default: none)",
    )
    add(
        "--max-sessions",
        type=int,
        default=64,
        metavar="N",
        help="limit of open sessions (default: %(default)s)",
    )
    add(
        "--max-runs",
        type=int,
        default=256,
        metavar="N",
        help="limit of running commands, shared by all sessions (default: %(default)s)",
    )
    add(
        "--max-connections",
        type=int,
        default=512,
        metavar="N",
        help="limit of open connections (default: %(default)s)",
    )
    add(
        "--max-buffer-mib",
        type=int,
        default=256,
        metavar="N",
        help="memory for unread output of all runs, in MiB (default: %(default)s)",
    )
    add(
        "--max-snapshots",
        type=int,
        default=100,
        metavar="N",
        help="limit of checkpoints that one session keeps (default: %(default)s)",
    )
    add(
        "--max-snapshot-mib",
        type=int,
        default=10240,
        metavar="N",
        help="disk space for the checkpoints of one session, in MiB (default: %(default)s)",
    )
    add(
        "--max-session-s",
        type=float,
        metavar="S",
        help="longest duration of a session in seconds; reduces longer timeouts of clients "
        "(default: no limit)",
    )
    add(
        "--grace",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that a session without connections and requests is kept "
        "(default: %(default)s)",
    )
    add(
        "--drain",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds to wait for running commands after SIGTERM (default: %(default)s)",
    )
    add(
        "--header-timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds until a new connection must have sent a request (default: %(default)s)",
    )
    add("--tls-cert", metavar="FILE", help="certificate chain in PEM format")
    add("--tls-key", metavar="FILE", help="private key of --tls-cert in PEM format")
    add(
        "--tls-self-signed",
        action="store_true",
        help="generate a certificate at every start; clients pin its fingerprint",
    )
    add(
        "--supervised",
        action="store_true",
        help="serve one session, described by a launch document on stdin; exit at end of stdin",
    )
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="lowest level that is logged (default: %(default)s)",
    )
    return parser  # fmt: skip


def config_from_arguments(argv: Sequence[str] | None, environ: Mapping[str, str]) -> Config:
    """Return the configuration of a command line and an environment.

    Args:
        argv: Arguments; None: those of this process.
        environ: Variables; the token may be in one of them.

    Raises:
        SandboxUsageError: A value is invalid, or two options contradict each other.

    """
    parsed = _parser().parse_args(argv)
    backends = tuple(dict.fromkeys(parsed.backend or ["userns"]))
    resolved = resolve_session(
        backend=backends[0],
        backends=registry.NAMES,
        network_mode=parsed.network_mode,
        network_allowlist=parsed.network_allow,
        preload=parsed.preload,
    )
    config = Config(
        binds=tuple(_bind(text) for text in parsed.bind or ["127.0.0.1:8080"]),
        verifier=_verifier(parsed.token_file, parsed.token_sha256_file, environ),
        mcp=None if parsed.mcp is None else _bind(parsed.mcp, "--mcp"),
        mcp_allow=tuple(parsed.mcp_allow),
        scraper=_scraper(parsed.metrics_token_file),
        backends=backends,
        work_dir=_absolute("--work-dir", parsed.work_dir),
        allow_paths=tuple(_absolute("--allow-path", path) for path in parsed.allow_path),
        allow_hosts=tuple(name.lower().rstrip(".") for name in parsed.allow_host),
        ceiling=resolved.network,
        allow_proxies=parse_allowed_proxies(parsed.allow_proxy, argument="--allow-proxy"),
        secrets={} if parsed.secrets is None else read_stored_secrets(parsed.secrets),
        preload=resolved.preload or (),
        max_sessions=_count("--max-sessions", parsed.max_sessions),
        max_runs=_count("--max-runs", parsed.max_runs),
        max_connections=_count("--max-connections", parsed.max_connections),
        max_buffer_bytes=_count("--max-buffer-mib", parsed.max_buffer_mib) * 1024 * 1024,
        max_snapshots=_count("--max-snapshots", parsed.max_snapshots, MAX_CHECKPOINTS),
        max_snapshot_bytes=_count("--max-snapshot-mib", parsed.max_snapshot_mib) * 1024 * 1024,
        max_session_s=validate_timeout("--max-session-s", parsed.max_session_s),
        grace_s=validate_timeout("--grace", parsed.grace) or 0.0,
        header_timeout_s=validate_timeout("--header-timeout", parsed.header_timeout) or 0.0,
        drain_s=validate_timeout("--drain", parsed.drain) or 0.0,
        tls_cert=parsed.tls_cert,
        tls_key=parsed.tls_key,
        tls_self_signed=parsed.tls_self_signed,
        log_level=parsed.log_level,
        supervised=parsed.supervised,
    )
    _check_together(config)
    return config


def _check_together(config: Config) -> None:
    if config.supervised and config.verifier is not None:
        raise SandboxUsageError(
            "--supervised does not accept a token: the launch document brings its own tokens",
            argument="--supervised",
            hint=f"remove the token option and unset {TOKEN_VARIABLE}",
        )
    if config.supervised and config.secrets:
        raise SandboxUsageError(
            "--supervised does not accept --secrets: the launch document brings its own",
            argument="--secrets",
        )
    if config.mcp_allow and config.mcp is None:
        raise SandboxUsageError("--mcp-allow needs --mcp", argument="--mcp-allow")
    if config.mcp is not None and config.supervised:
        raise SandboxUsageError(
            "--supervised serves one session to one client; it has no MCP endpoint",
            argument="--mcp",
        )
    if config.verifier is None and not config.supervised:
        binds = [("--bind", bind) for bind in config.binds]
        if config.mcp is not None:
            binds.append(("--mcp", config.mcp))
        for argument, bind in binds:
            if not bind.is_local:
                raise SandboxUsageError(
                    f"{argument} {bind} is reachable from other machines and requires a token",
                    argument=argument,
                    hint=f"use --token-file, set {TOKEN_VARIABLE}, or bind to 127.0.0.1 or "
                    "unix:PATH",
                )
    if (config.tls_cert is None) != (config.tls_key is None):
        raise SandboxUsageError(
            "--tls-cert and --tls-key must be given together", argument="--tls-cert"
        )
    if config.tls_self_signed and config.tls_cert is not None:
        raise SandboxUsageError(
            "--tls-self-signed and --tls-cert are mutually exclusive",
            argument="--tls-self-signed",
        )


def _count(argument: str, value: int, maximum: int | None = None) -> int:
    if value < 1:
        raise SandboxUsageError(f"{argument} must be at least 1, got {value}", argument=argument)
    if maximum is not None and value > maximum:
        raise SandboxUsageError(
            f"{argument} must be at most {maximum}, got {value}", argument=argument
        )
    return value


def _absolute(argument: str, path: str) -> str:
    if not path.startswith("/"):
        raise SandboxUsageError(
            f"{argument} must be an absolute path, got {path!r}", argument=argument
        )
    return os.path.normpath(path)


def _bind(text: str, argument: str = "--bind") -> Bind:
    if text.startswith("unix:") and argument == "--bind":
        return Bind(path=_absolute("--bind", text.removeprefix("unix:").removeprefix("//")))
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        accepted = "HOST:PORT or unix:PATH" if argument == "--bind" else "HOST:PORT"
        raise SandboxUsageError(
            f"{argument} must be {accepted}, got {text!r}",
            argument=argument,
            hint="for example 127.0.0.1:8080 or [::1]:8080"
            + (", or unix:/run/sandbox.sock" if argument == "--bind" else ""),
        )
    return Bind(host=host.removeprefix("[").removesuffix("]"), port=int(port))


def _scraper(file: str | None) -> Verifier | None:
    if file is None:
        return None
    source = "--metrics-token-file"
    return _token_verifier(read_secret(source, file, is_secret=True), source)


def _verifier(
    token_file: str | None, digest_file: str | None, environ: Mapping[str, str]
) -> Verifier | None:
    """Return the verifier of the one token source that is set; more than one is an error."""
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
        raise SandboxUsageError(
            f"{named[0]} and {named[1]} are both set; accepted is one of them",
            argument=named[0],
            hint=f"remove {named[1]}",
        )
    source = named[0]
    is_digest = source in {"--token-sha256-file", VERIFIER_VARIABLE}
    if token_file is not None or digest_file is not None:
        secret = read_secret(source, token_file or digest_file or "", is_secret=not is_digest)
    else:
        secret = given[source] or ""
    if is_digest:
        return Verifier.from_digest(secret.strip(), argument=source)
    return _token_verifier(secret, source)


def _token_verifier(secret: str, source: str) -> Verifier:
    """Return the verifier of a token; raise if it is too weak, or no header can carry it."""
    # One line end, LF or CRLF, belongs to the file; the rest is the token.
    secret = secret.removesuffix("\n").removesuffix("\r")
    if secret != secret.strip() or not secret.isprintable():
        raise SandboxUsageError(
            f"the token in {source} begins or ends with white space, has more than one line, or "
            "contains a control character; a header cannot carry it",
            argument=source,
            hint="write it as one line: printf '%s' TOKEN > FILE",
        )
    if len(secret) < _MIN_TOKEN_CHARS or not secret.isascii():
        raise SandboxUsageError(
            f"the token in {source} must be at least {_MIN_TOKEN_CHARS} printable ASCII characters",
            argument=source,
            hint="generate one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return Verifier.from_token(secret)
