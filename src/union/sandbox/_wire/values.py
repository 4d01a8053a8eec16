"""Encode values as JSON for the wire, and decode them strictly.

The description of a session or a run goes through the same checks as a caller's own arguments
(``_core/resolve.py``), so that a server accepts nothing that a session on its own machine refuses.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

from union.sandbox._core.events import Exited, Failed, Started, Usage
from union.sandbox._core.files import FileInfo, FileKind
from union.sandbox._core.isolation import Isolation
from union.sandbox._core.resolve import resolve_run, resolve_session
from union.sandbox._core.resolve_call import RESOURCE_OF
from union.sandbox._core.resources import Resources
from union.sandbox._policy.http_entries import texts_of
from union.sandbox._wire.checks import checked as _checked
from union.sandbox._wire.checks import number as _number
from union.sandbox._wire.errors import clean_text
from union.sandbox._wire.frames import WireError, parse_json, to_json
from union.sandbox._wire.network_values import (
    decode_decision,
    decode_request,
    encode_decision,
    encode_request,
)
from union.sandbox.constants import DEVNULL, PIPE, STDOUT, Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from union.sandbox._core.events import Event
    from union.sandbox._core.spec import CallPosture, Limits, NetworkSpec, RunSpec, SessionSpec
    from union.sandbox._policy.entries import Entry

__all__ = [
    "MAX_START",
    "EntryEncoder",
    "SessionInfo",
    "Start",
    "decode_decision",
    "decode_event",
    "decode_file",
    "decode_run",
    "decode_run_start",
    "decode_session",
    "decode_session_info",
    "decode_start_body",
    "encode_decision",
    "encode_event",
    "encode_file",
    "encode_network",
    "encode_request",
    "encode_run",
    "encode_session",
    "encode_session_info",
    "encode_start_body",
    "reject_unknown",
]

MAX_START: Final = 80 * 1024 * 1024
"""The most bytes of the description of one run: its command, its environment, its stdin."""
_SIZES: Final = struct.Struct(">II")
_MAX_HEAD: Final = 32 * 1024 * 1024
"""The most bytes of a START but for the command's text and its stdin."""


_MAX_TEXT: Final = 1024
_MAX_ITEMS: Final = 256
_MAX_PATH: Final = 4096
_MAX_PATHS: Final = 10_000
_MAX_GRACE_S: Final = 7 * 24 * 3600.0


def _whole(value: object, what: str, *, maximum: int = 2**63) -> int:
    """Return a whole number from 0 to ``maximum``."""
    number: int = _checked(value, int, what)
    if not 0 <= number <= maximum:
        raise WireError(f"{what} must be a whole number from 0 to {maximum}")
    return number


def _printable(value: object, what: str) -> str:
    """Return a short text without terminal control characters."""
    text: str = _checked(value, str, what)
    if len(text) > _MAX_TEXT or not text.isprintable():
        raise WireError(f"{what} must be printable text of at most {_MAX_TEXT} characters")
    return text


def _absolute(value: object, what: str) -> str:
    """Return an absolute path inside the sandbox; it may contain any byte but NUL."""
    path: str = _checked(value, str, what)
    if not path.startswith("/") or "\0" in path or len(path) > _MAX_PATH:
        raise WireError(f"{what} must be an absolute path of at most {_MAX_PATH} characters")
    return path


def _printable_list(value: object, what: str) -> tuple[str, ...]:
    items = _checked(value, list, what)
    if len(items) > _MAX_ITEMS:
        raise WireError(f"{what} must have at most {_MAX_ITEMS} entries, got {len(items)}")
    return tuple(_printable(item, what) for item in items)


def reject_unknown(value: dict[str, Any], known: frozenset[str], what: str) -> None:
    """Raise if ``value`` has a field that is not ``known``."""
    if unknown := value.keys() - known:
        raise WireError(f"{what} has no field {min(unknown)!r:.100}")


# A session.


class EntryEncoder(Protocol):
    """Encodes an allow-list that may have ``Http`` entries (``http_values``)."""

    def encode(self, allow: tuple[Entry, ...], /) -> dict[str, Any]:
        """Return the fields ``network_allowlist`` and, with values to send, ``secrets``."""


_SESSION: Final = frozenset(
    {
        "backend", "host_work_dir", "work_dir_name", "network_mode", "network_allowlist",
        "network_denylist", "network_proxy_url", "network_socks_url", "timeout_s", "env",
        "read_only_paths", "read_write_paths", "resources", "strict", "warm", "preload",
        "persist", "shell",
    }
)  # fmt: skip


def encode_network(network: NetworkSpec, entries: EntryEncoder | None = None) -> dict[str, Any]:
    """Encode mode and allow-list, ``Http`` entries by ``entries``; the rest is the session's."""
    payload: dict[str, Any] = {"network_mode": network.mode}
    if network.mode == "allowlist":
        encode = _encode_texts if entries is None else entries.encode
        payload |= encode(network.allow)
    return payload


def _encode_texts(allow: tuple[Entry, ...]) -> dict[str, Any]:
    return {"network_allowlist": texts_of(allow)}


def _encode_resources(limits: Limits, defaults: dict[str, Any]) -> dict[str, Any]:
    """Encode limits as fields of ``resources``, without those equal to ``defaults``."""
    named = {
        RESOURCE_OF.get(field.name, field.name): getattr(limits, field.name)
        for field in dataclasses.fields(limits)
    }
    return {name: value for name, value in named.items() if value != defaults.get(name)}


def _encode_call(call: CallPosture, session: SessionSpec) -> dict[str, Any]:
    """Encode the settings that one call changes about its session."""
    return {
        "read_only_paths": list(call.read_only_paths) or None,
        "read_write_paths": list(call.read_write_paths) or None,
        "resources": _encode_resources(call.limits, _encode_resources(session.limits, {})) or None,
    }


def encode_session(spec: SessionSpec, entries: EntryEncoder | None = None) -> dict[str, Any]:
    """Encode a session as the arguments that describe it; default values are left out."""
    payload = {
        **(encode_network(spec.network, entries) if spec.network_is_ceiling else {}),
        "backend": spec.backend,
        "host_work_dir": spec.host_work_dir,
        "work_dir_name": spec.work_dir_name,
        "network_denylist": [entry.text for entry in spec.network.deny] or None,
        "network_proxy_url": spec.network.proxy_url,
        "network_socks_url": spec.network.socks_url,
        "timeout_s": spec.timeout_s,
        "env": dict(spec.env) or None,
        "read_only_paths": list(spec.read_only_paths) or None,
        "read_write_paths": list(spec.read_write_paths) or None,
        "resources": _encode_resources(spec.limits, {"gpu": 0}),
        "strict": spec.strict or None,
        "warm": spec.warm,
        "preload": list(spec.preload or ()) or None,
        "persist": None if spec.persist == "workdir" else spec.persist,
        "shell": spec.shell,
    }
    without = {"preload": None} if spec.preload is None else {}  # not the default
    return {name: value for name, value in payload.items() if value is not None} | without


def decode_session(
    payload: dict[str, Any], *, backends: Sequence[str], default_backend: str
) -> SessionSpec:
    """Decode a session from the arguments that describe it.

    Raises:
        SandboxUsageError: ``on_device.session()`` would raise it for the same arguments.
        WireError: an argument is unknown.

    """
    reject_unknown(payload, _SESSION, "a session")
    options = _with_resources(payload)
    backend = options.pop("backend", "default")
    if backend == "default":
        backend = default_backend
    return resolve_session(backend=backend, backends=backends, **options)


def _with_resources(payload: dict[str, Any]) -> dict[str, Any]:
    options = dict(payload)
    resources = options.pop("resources", None)
    if resources is not None:
        _checked(resources, dict, "resources")
        names = frozenset(field.name for field in dataclasses.fields(Resources))
        reject_unknown(resources, names, "resources")
        options["resources"] = Resources(**resources)
    return options


# A run.

_RUN: Final = frozenset(
    {
        "argv", "env", "cwd", "stdout", "stderr", "stdin", "network_mode",
        "network_allowlist", "timeout_s", "background", "pty", "resources", "read_only_paths",
        "read_write_paths",
    }
)  # fmt: skip


_MODES: Final = ("stdout", "stderr")


def encode_run(spec: RunSpec, session: SessionSpec, entries: EntryEncoder | None = None) -> bytes:
    """Encode a run as the body of a START: sizes, a JSON object, the command's text, its stdin."""
    payload: dict[str, Any] = {
        "kind": spec.kind,
        "argv": list(spec.argv) or None,
        "env": dict(spec.env) or None,
        "cwd": spec.cwd,
        "stdout": "pipe" if spec.stdout == "inherit" else spec.stdout,
        "stderr": _encode_stderr(spec),
        "stdin": "bytes" if isinstance(spec.stdin, bytes) else spec.stdin,
        "timeout_s": spec.timeout_s,
        "background": spec.background or None,
        "pty": spec.pty,
    }
    if spec.network != session.network:
        payload |= encode_network(spec.network, entries)
    if spec.call is not None:
        payload |= _encode_call(spec.call, session)
    text = spec.text.encode("utf-8", "surrogateescape")
    return encode_start_body(payload, text, spec.stdin if isinstance(spec.stdin, bytes) else b"")


def encode_start_body(payload: dict[str, Any], text: bytes, stdin: bytes = b"") -> bytes:
    """Encode the body of a START; fields of ``payload`` that are None are left out."""
    head = to_json({name: value for name, value in payload.items() if value is not None})
    return b"".join((_SIZES.pack(len(head), len(text)), head, text, stdin))


def _encode_stderr(spec: RunSpec) -> str:
    if spec.merged:
        return "stdout"
    return "pipe" if spec.stderr == "inherit" else spec.stderr


class Start(NamedTuple):
    """The body of a START, its fields not checked yet."""

    kind: str
    fields: dict[str, Any]
    text: str
    stdin: bytes


def decode_start_body(body: bytes) -> Start:
    """Split the body of a START.

    Raises:
        WireError: the body is malformed.

    """
    if len(body) < _SIZES.size:
        raise WireError(f"START body must have at least {_SIZES.size} bytes, got {len(body)}")
    head_size, text_size = _SIZES.unpack_from(body)
    text_at = _SIZES.size + head_size
    stdin_at = text_at + text_size
    if stdin_at > len(body):
        raise WireError(f"truncated START body: {stdin_at} bytes announced, got {len(body)}")
    fields = parse_json(body[_SIZES.size : text_at], max_bytes=_MAX_HEAD)
    try:
        text = body[text_at:stdin_at].decode("utf-8", "surrogateescape")
    except UnicodeDecodeError as exc:
        raise WireError("the command must be UTF-8 text") from exc
    kind = _checked(fields.pop("kind", None), str, "kind")
    return Start(kind, fields, text, body[stdin_at:])


def decode_run(body: bytes, session: SessionSpec) -> RunSpec:
    """Decode the run that the body of a START describes; raises as ``decode_run_start``."""
    return decode_run_start(decode_start_body(body), session)


def decode_run_start(start: Start, session: SessionSpec) -> RunSpec:
    """Decode the run that a START describes.

    Raises:
        SandboxUsageError: ``Session.run()`` would raise it for the same arguments.
        WireError: a field is malformed.

    """
    kind, payload, text, stdin_bytes = start
    reject_unknown(payload, _RUN, "a run")
    if kind not in {"shell", "python", "argv"}:
        raise WireError(f"kind must be shell, python or argv, got {kind!r:.100}")
    argv = payload.pop("argv", None)
    stdin = _checked(payload.pop("stdin", ""), str, "stdin")
    if stdin not in {"", "pipe", "bytes"}:
        raise WireError(f"stdin must be pipe, bytes or empty, got {stdin!r:.100}")
    streams = {name: _decode_stream(payload.pop(name, "devnull"), name) for name in _MODES}
    if payload.get("pty") is not None:
        streams["stderr"] = None  # A terminal has one output stream.
    return resolve_run(
        session,
        argv if kind == "argv" else text,
        script_type="python" if kind == "python" else "shell",
        stdin=stdin_bytes if stdin == "bytes" else PIPE if stdin else None,
        **streams,
        **_with_resources(payload),
    )


def _decode_stream(value: object, name: str) -> Stream | None:
    mode = _checked(value, str, name)
    if mode == "stdout" and name == "stderr":
        return STDOUT
    if mode not in {"collect", "pipe", "devnull"}:
        raise WireError(f"{name} must be collect, pipe or devnull, got {mode!r:.100}")
    return {"collect": None, "pipe": PIPE, "devnull": DEVNULL}[mode]


# An open session.


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """The description of an open session that its server returns."""

    session: str
    work_dir: str
    isolation: Isolation
    fs_allowlist: dict[str, tuple[str, ...]]
    grace_s: float
    """How long the server keeps the session for a client without a connection."""
    has_contexts: bool = False
    """Whether the server runs contexts."""
    is_machine: bool = False
    """Whether file calls accept every path that is visible inside."""
    shell: str = "/bin/sh"
    """The shell that runs commands given as text."""


def encode_session_info(info: SessionInfo) -> dict[str, Any]:
    return {
        "session": info.session,
        "work_dir": info.work_dir,
        "isolation": info.isolation.to_dict(),
        "fs_allowlist": {name: list(paths) for name, paths in info.fs_allowlist.items()},
        "grace_s": info.grace_s,
        "contexts": info.has_contexts,
        "machine": info.is_machine,
        "shell": info.shell,
    }


def decode_session_info(payload: dict[str, Any]) -> SessionInfo:
    try:
        return SessionInfo(
            session=_checked(payload["session"], str, "session"),
            work_dir=_absolute(payload["work_dir"], "work_dir"),
            isolation=decode_isolation(_checked(payload["isolation"], dict, "isolation")),
            fs_allowlist={
                name: _paths(payload["fs_allowlist"][name]) for name in ("read_only", "read_write")
            },
            grace_s=_grace(payload["grace_s"]),
            has_contexts=_checked(payload.get("contexts", False), bool, "contexts"),
            is_machine=payload.get("machine") is True,  # an older server does not send it
            shell=_absolute(payload.get("shell", "/bin/sh"), "shell"),  # nor this
        )
    except (KeyError, TypeError, AttributeError) as exc:
        raise WireError(f"malformed description of a session: {exc!r}") from exc


def _paths(value: object) -> tuple[str, ...]:
    paths = _checked(value, list, "paths")
    if len(paths) > _MAX_PATHS:
        raise WireError(f"a list must have at most {_MAX_PATHS} paths, got {len(paths)}")
    return tuple(_absolute(path, "path") for path in paths)


def _grace(value: object) -> float:
    seconds = _number(value, "grace_s")
    if not 0 <= seconds <= _MAX_GRACE_S:
        raise WireError(f"grace_s must be 0 to {_MAX_GRACE_S:g}, got {seconds:g}")
    return seconds


def decode_isolation(payload: dict[str, Any]) -> Isolation:
    """Decode an isolation report; unknown fields of a newer server are ignored."""
    if "backend" not in payload:
        raise WireError("the isolation report has no backend")
    known: dict[str, Any] = {}
    for name, kind in _REPORT.items():
        if name in payload:
            value = payload[name]
            known[name] = _printable(value, name) if kind is str else _checked(value, kind, name)
    for name in ("namespaces", "capabilities"):
        if payload.get(name) is not None:
            known[name] = _printable_list(payload[name], name)
    limits = _checked(payload.get("limits", {}), dict, "limits")
    if len(limits) > _MAX_ITEMS:
        raise WireError(f"limits must have at most {_MAX_ITEMS} entries, got {len(limits)}")
    known["limits"] = tuple(
        (_printable(name, "limits"), _printable(by, name)) for name, by in limits.items()
    )
    return Isolation(**known)


_REPORT: Final[dict[str, type]] = {
    **dict.fromkeys(("backend", "root", "proc", "ids", "seccomp", "egress", "persist"), str),
    "layers": str,
    "landlock_abi": int,
    "no_new_privs": bool,
}


# Events of a run.

_MAX_EVENT: Final = 64 * 1024
_USAGE: Final = tuple(field.name for field in dataclasses.fields(Usage))


def encode_event(event: Event) -> bytes:
    payload: dict[str, Any]
    match event:
        case Started():
            payload = {"started": {"pid": event.pid}}
        case Exited():
            # One for every run: ``dataclasses.asdict`` would copy each value deeply.
            usage = {name: getattr(event.usage, name) for name in _USAGE}
            payload = {
                "exited": {"returncode": event.returncode, "reason": event.reason, "usage": usage}
            }
        case Failed():
            payload = {"failed": event._asdict()}
    return to_json(payload)


def encode_started(event: Started, isolation: Isolation | None) -> bytes:
    """Encode ``Started``, with the isolation of the command where it differs from the session's."""
    payload: dict[str, Any] = {"pid": event.pid}
    if isolation is not None:
        payload["isolation"] = isolation.to_dict()
    return to_json({"started": payload})


def decode_event(data: bytes) -> tuple[str, Any]:
    """Return the name of an event and its value: ``Event``, ``Decision`` or plain fields."""
    payload = parse_json(data, max_bytes=_MAX_EVENT)
    if len(payload) != 1:
        raise WireError(f"an EVENT frame must have one event, got {len(payload)}")
    name, value = payload.popitem()
    _checked(value, dict, "event")
    try:
        match name:
            case "started":
                return name, (Started(_whole(value["pid"], "pid")), value.get("isolation"))
            case "exited":
                return name, Exited(
                    _whole(value["returncode"], "returncode", maximum=255),
                    _printable(value["reason"], "reason"),
                    _decode_usage(_checked(value["usage"], dict, "usage")),
                )
            case "failed":
                names = ("stage", "reason", "code", "hint")
                return name, Failed(*(clean_text(_checked(value[n], str, n)) for n in names))
            case "decision":
                return name, decode_decision(value)
            case "request":
                return name, decode_request(value)
            case "refused" | "context":
                return name, value
    except KeyError as exc:
        raise WireError(f"event {name} has no field {exc}") from exc
    raise WireError(f"unknown event {name!r:.100}")


def _decode_usage(payload: dict[str, Any]) -> Usage:
    peak = payload.get("peak_memory_bytes")
    return Usage(
        cpu_user_s=_number(payload["cpu_user_s"], "cpu_user_s"),
        cpu_system_s=_number(payload["cpu_system_s"], "cpu_system_s"),
        max_rss_bytes=_whole(payload["max_rss_bytes"], "max_rss_bytes"),
        peak_memory_bytes=None if peak is None else _whole(peak, "peak_memory_bytes"),
    )


# Files.


def encode_file(info: FileInfo) -> dict[str, Any]:
    return dataclasses.asdict(info)


def _relative(value: object) -> str:
    """Return a path below the work dir; a server cannot send one that leads outside it."""
    path: str = _checked(value, str, "path")
    parts = path.split("/")
    if "\0" in path or path.startswith("/") or ".." in parts or not path:
        raise WireError(f"path must be relative and below the work dir, got {path!r:.100}")
    return path


def _visible(value: object) -> str:
    """Return a path of a machine, which may be any; the caller knows what it must begin with."""
    path: str = _checked(value, str, "path")
    if "\0" in path or not path:
        raise WireError(f"path must not be empty or have a NUL, got {path!r:.100}")
    return path


def decode_file(payload: object, *, is_machine: bool = False) -> FileInfo:
    """Decode the description of a file; only one of a machine may be outside the work dir."""
    value = _checked(payload, dict, "file")
    try:
        kind = _checked(value["kind"], str, "kind")
        if kind not in {"file", "dir", "symlink", "other"}:
            raise WireError(f"kind must be file, dir, symlink or other, got {kind!r:.100}")
        return FileInfo(
            path=_visible(value["path"]) if is_machine else _relative(value["path"]),
            kind=cast("FileKind", kind),
            size=_whole(value["size"], "size"),
            mode=_whole(value["mode"], "mode", maximum=0o177777),
            mtime=_number(value["mtime"], "mtime"),
        )
    except KeyError as exc:
        raise WireError(f"file has no field {exc}") from exc
