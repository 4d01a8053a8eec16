"""Values as the wire carries them: plain JSON, read back strictly.

What describes a session or a run is not rebuilt field by field: it goes through the same checks as
a caller's own arguments (``_core/resolve.py``), so that a server believes nothing that a session on
its own machine would refuse.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from union.sandbox._core.events import Exited, Failed, Started, Usage
from union.sandbox._core.files import FileInfo, FileKind
from union.sandbox._core.isolation import Isolation
from union.sandbox._core.resolve import resolve_run, resolve_session
from union.sandbox._core.resolve_call import RESOURCE_OF
from union.sandbox._core.resources import Resources
from union.sandbox._policy.decision import Decision, Door
from union.sandbox._wire.errors import clean_text
from union.sandbox._wire.frames import WireError, parse_json, to_json
from union.sandbox.constants import DEVNULL, PIPE, Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from union.sandbox._core.events import Event
    from union.sandbox._core.spec import CallPosture, Limits, NetworkSpec, RunSpec, SessionSpec

__all__ = [
    "MAX_START",
    "SessionInfo",
    "decode_decision",
    "decode_event",
    "decode_file",
    "decode_run",
    "decode_session",
    "decode_session_info",
    "encode_decision",
    "encode_event",
    "encode_file",
    "encode_run",
    "encode_session",
    "encode_session_info",
]

MAX_START: Final = 80 * 1024 * 1024
"""The most that the description of one run may take: its command, its environment, its stdin."""
_SIZES: Final = struct.Struct(">II")
_MOST_HEAD: Final = 32 * 1024 * 1024
"""Of a start: everything but the command's text and its stdin."""


_MOST_WORD: Final = 1024
_MOST_WORDS: Final = 256
_MOST_PATH: Final = 4096
_MOST_PATHS: Final = 10_000
_LONGEST_GRACE_S: Final = 7 * 24 * 3600.0


def _checked(value: object, kind: type | tuple[type, ...], what: str) -> Any:
    if isinstance(value, bool) and kind is not bool:
        raise WireError(f"{what} is {value!r}")
    if not isinstance(value, kind):
        raise WireError(f"{what} is a {type(value).__name__}")
    return value


def _number(value: object, what: str) -> float:
    """A finite number as a float; JSON has numbers that are too large to be one."""
    try:
        number = float(_checked(value, (int, float), what))
    except OverflowError as exc:
        raise WireError(f"{what} is too large") from exc
    if not math.isfinite(number):
        raise WireError(f"{what} is not finite")
    return number


def _whole(value: object, what: str, *, most: int = 2**63) -> int:
    """A whole number from 0 to ``most``."""
    number: int = _checked(value, int, what)
    if not 0 <= number <= most:
        raise WireError(f"{what} is out of range")
    return number


def _word(value: object, what: str) -> str:
    """A short text without control characters, which a terminal would obey."""
    text: str = _checked(value, str, what)
    if len(text) > _MOST_WORD or not text.isprintable():
        raise WireError(f"{what} is not a printable text of at most {_MOST_WORD} characters")
    return text


def _absolute(value: object, what: str) -> str:
    """The absolute path of something inside; any byte but NUL may be in it."""
    path: str = _checked(value, str, what)
    if not path.startswith("/") or "\0" in path or len(path) > _MOST_PATH:
        raise WireError(f"{what} is not an absolute path")
    return path


def _words(value: object, what: str) -> tuple[str, ...]:
    items = _checked(value, list, what)
    if len(items) > _MOST_WORDS:
        raise WireError(f"{what} has {len(items)} entries")
    return tuple(_word(item, what) for item in items)


def _only(value: dict[str, Any], known: frozenset[str], what: str) -> None:
    if unknown := value.keys() - known:
        raise WireError(f"{what} has no {min(unknown)!r:.100}")


# A session.

_SESSION: Final = frozenset(
    {
        "backend", "host_work_dir", "network_mode", "network_allowlist", "network_denylist",
        "network_proxy_url", "network_socks_url", "timeout_s", "env", "read_only_paths",
        "read_write_paths", "resources", "strict", "warm", "preload",
    }
)  # fmt: skip


def _encode_network(network: NetworkSpec) -> dict[str, Any]:
    told: dict[str, Any] = {"network_mode": network.mode}
    if network.mode == "allowlist":
        told["network_allowlist"] = [entry.text for entry in network.allow]
    return told


def _encode_resources(limits: Limits, usual: dict[str, Any]) -> dict[str, Any]:
    """Limits as fields of ``resources``, without those that have their usual value."""
    named = {
        RESOURCE_OF.get(field.name, field.name): getattr(limits, field.name)
        for field in dataclasses.fields(limits)
    }
    return {name: value for name, value in named.items() if value != usual.get(name)}


def _encode_call(call: CallPosture, session: SessionSpec) -> dict[str, Any]:
    """What one call changes about its session."""
    return {
        "read_only_paths": list(call.read_only_paths) or None,
        "read_write_paths": list(call.read_write_paths) or None,
        "resources": _encode_resources(call.limits, _encode_resources(session.limits, {})) or None,
    }


def encode_session(spec: SessionSpec) -> dict[str, Any]:
    """A session as the arguments that describe it; what is usual is left out."""
    told = {
        **(_encode_network(spec.network) if spec.network_is_ceiling else {}),
        "backend": spec.backend,
        "host_work_dir": spec.host_work_dir,
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
        "preload": list(spec.preload) or None,
    }
    return {name: value for name, value in told.items() if value is not None}


def decode_session(
    told: dict[str, Any], *, backends: Sequence[str], default_backend: str
) -> SessionSpec:
    """The session that these arguments describe.

    Raises:
        SandboxUsageError: what ``on_device.session()`` raises for them.
        WireError: there is an argument that a session does not have.

    """
    _only(told, _SESSION, "a session")
    options = _with_resources(told)
    backend = options.pop("backend", "default")
    if backend == "default":
        backend = default_backend
    return resolve_session(backend=backend, backends=backends, **options)


def _with_resources(told: dict[str, Any]) -> dict[str, Any]:
    options = dict(told)
    resources = options.pop("resources", None)
    if resources is not None:
        _checked(resources, dict, "resources")
        names = frozenset(field.name for field in dataclasses.fields(Resources))
        _only(resources, names, "resources")
        options["resources"] = Resources(**resources)
    return options


# A run.

_RUN: Final = frozenset(
    {
        "kind", "argv", "env", "cwd", "stdout", "stderr", "stdin", "network_mode",
        "network_allowlist", "timeout_s", "background", "pty", "resources", "read_only_paths",
        "read_write_paths",
    }
)  # fmt: skip


_MODES: Final = ("stdout", "stderr")


def encode_run(spec: RunSpec, session: SessionSpec) -> bytes:
    """A run, ready to be cut into parts: sizes, a JSON object, the command's text, its stdin."""
    told: dict[str, Any] = {
        "kind": spec.kind,
        "argv": list(spec.argv) or None,
        "env": dict(spec.env) or None,
        "cwd": spec.cwd,
        "stdout": "pipe" if spec.stdout == "inherit" else spec.stdout,
        "stderr": "pipe" if spec.stderr == "inherit" else spec.stderr,
        "stdin": "bytes" if isinstance(spec.stdin, bytes) else spec.stdin,
        "timeout_s": spec.timeout_s,
        "background": spec.background or None,
        "pty": spec.pty,
    }
    if spec.network != session.network:
        told |= _encode_network(spec.network)
    if spec.call is not None:
        told |= _encode_call(spec.call, session)
    head = to_json({name: value for name, value in told.items() if value is not None})
    text = spec.text.encode("utf-8", "surrogateescape")
    stdin = spec.stdin if isinstance(spec.stdin, bytes) else b""
    return b"".join((_SIZES.pack(len(head), len(text)), head, text, stdin))


def decode_run(body: bytes, session: SessionSpec) -> RunSpec:
    """The run that a start describes.

    Raises:
        SandboxUsageError: what ``Session.run()`` raises for its arguments.
        WireError: it is not a start.

    """
    if len(body) < _SIZES.size:
        raise WireError("a start without its sizes")
    head_size, text_size = _SIZES.unpack_from(body)
    text_at = _SIZES.size + head_size
    stdin_at = text_at + text_size
    if stdin_at > len(body):
        raise WireError("a start that is cut short")
    told = parse_json(body[_SIZES.size : text_at], most=_MOST_HEAD)
    _only(told, _RUN, "a run")
    try:
        text = body[text_at:stdin_at].decode("utf-8", "surrogateescape")
    except UnicodeDecodeError as exc:
        raise WireError("a command that is not text") from exc
    kind = _checked(told.pop("kind", None), str, "kind")
    if kind not in {"shell", "python", "argv"}:
        raise WireError(f"kind is {kind!r:.100}")
    argv = told.pop("argv", None)
    stdin = _checked(told.pop("stdin", ""), str, "stdin")
    if stdin not in {"", "pipe", "bytes"}:
        raise WireError(f"stdin is {stdin!r:.100}")
    streams = {name: _decode_stream(told.pop(name, "devnull"), name) for name in _MODES}
    if told.get("pty") is not None:
        streams["stderr"] = None  # a terminal has one output
    return resolve_run(
        session,
        argv if kind == "argv" else text,
        script_type="python" if kind == "python" else "shell",
        stdin=body[stdin_at:] if stdin == "bytes" else PIPE if stdin else None,
        **streams,
        **_with_resources(told),
    )


def _decode_stream(value: object, name: str) -> Stream | None:
    mode = _checked(value, str, name)
    if mode not in {"collect", "pipe", "devnull"}:
        raise WireError(f"{name} is {mode!r:.100}")
    return {"collect": None, "pipe": PIPE, "devnull": DEVNULL}[mode]


# What is true of an open session.


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """What a server tells about a session that it has opened."""

    session: str
    work_dir: str
    isolation: Isolation
    fs_allowlist: dict[str, tuple[str, ...]]
    grace_s: float
    """How long the server keeps the session for a client that it does not hear from."""


def encode_session_info(info: SessionInfo) -> dict[str, Any]:
    return {
        "session": info.session,
        "work_dir": info.work_dir,
        "isolation": info.isolation.to_dict(),
        "fs_allowlist": {name: list(paths) for name, paths in info.fs_allowlist.items()},
        "grace_s": info.grace_s,
    }


def decode_session_info(told: dict[str, Any]) -> SessionInfo:
    try:
        return SessionInfo(
            session=_checked(told["session"], str, "session"),
            work_dir=_absolute(told["work_dir"], "work_dir"),
            isolation=decode_isolation(_checked(told["isolation"], dict, "isolation")),
            fs_allowlist={
                name: _paths(told["fs_allowlist"][name]) for name in ("read_only", "read_write")
            },
            grace_s=_grace(told["grace_s"]),
        )
    except (KeyError, TypeError, AttributeError) as exc:
        raise WireError(f"this does not describe an open session: {exc!r}") from exc


def _paths(value: object) -> tuple[str, ...]:
    paths = _checked(value, list, "paths")
    if len(paths) > _MOST_PATHS:
        raise WireError(f"{len(paths)} paths")
    return tuple(_absolute(path, "a path") for path in paths)


def _grace(value: object) -> float:
    seconds = _number(value, "grace_s")
    if not 0 <= seconds <= _LONGEST_GRACE_S:
        raise WireError(f"grace_s is {seconds:g}")
    return seconds


def decode_isolation(told: dict[str, Any]) -> Isolation:
    """A report; what a newer server adds to it is left out."""
    if "backend" not in told:
        raise WireError("a report lacks its backend")
    known: dict[str, Any] = {
        name: _word(told[name], name) if kind is str else _checked(told[name], kind, name)
        for name, kind in _REPORT.items()
        if name in told
    }
    for name in ("namespaces", "capabilities"):
        if told.get(name) is not None:
            known[name] = _words(told[name], name)
    limits = _checked(told.get("limits", {}), dict, "limits")
    if len(limits) > _MOST_WORDS:
        raise WireError(f"{len(limits)} limits")
    known["limits"] = tuple((_word(name, "limits"), _word(by, name)) for name, by in limits.items())
    return Isolation(**known)


_REPORT: Final[dict[str, type]] = {
    **dict.fromkeys(("backend", "root", "proc", "ids", "seccomp", "egress"), str),
    "landlock_abi": int,
    "no_new_privs": bool,
}


# What happens to a run.

_MOST_EVENT: Final = 64 * 1024


def encode_event(event: Event) -> bytes:
    told: dict[str, Any]
    match event:
        case Started():
            told = {"started": {"pid": event.pid}}
        case Exited():
            usage = dataclasses.asdict(event.usage)
            told = {
                "exited": {"returncode": event.returncode, "reason": event.reason, "usage": usage}
            }
        case Failed():
            told = {"failed": event._asdict()}
    return to_json(told)


def encode_started(event: Started, isolation: Isolation | None) -> bytes:
    """``Started``, and what is enforced for this one command where that is not the session's."""
    told: dict[str, Any] = {"pid": event.pid}
    if isolation is not None:
        told["isolation"] = isolation.to_dict()
    return to_json({"started": told})


def encode_decision(decision: Decision) -> bytes:
    return to_json({"decision": dataclasses.asdict(decision)})


def decode_event(data: bytes) -> tuple[str, Any]:
    """What an EVENT frame tells: its name, and ``Event``, ``Decision``, or a refusal as it came."""
    told = parse_json(data, most=_MOST_EVENT)
    if len(told) != 1:
        raise WireError("one event at a time")
    name, value = told.popitem()
    _checked(value, dict, "an event")
    try:
        match name:
            case "started":
                return name, (Started(_whole(value["pid"], "pid")), value.get("isolation"))
            case "exited":
                return name, Exited(
                    _whole(value["returncode"], "returncode", most=255),
                    _word(value["reason"], "reason"),
                    _decode_usage(_checked(value["usage"], dict, "usage")),
                )
            case "failed":
                names = ("stage", "reason", "code", "hint")
                return name, Failed(*(clean_text(_checked(value[n], str, n)) for n in names))
            case "decision":
                return name, decode_decision(value)
            case "refused":
                return name, value
    except KeyError as exc:
        raise WireError(f"{name} lacks {exc}") from exc
    raise WireError(f"there is no event {name!r:.100}")


def _decode_usage(told: dict[str, Any]) -> Usage:
    peak = told.get("peak_memory_bytes")
    return Usage(
        cpu_user_s=_number(told["cpu_user_s"], "cpu_user_s"),
        cpu_system_s=_number(told["cpu_system_s"], "cpu_system_s"),
        max_rss_bytes=_whole(told["max_rss_bytes"], "max_rss_bytes"),
        peak_memory_bytes=None if peak is None else _whole(peak, "peak_memory_bytes"),
    )


_DECISION: Final[dict[str, tuple[type, ...]]] = {
    "time": (int, float), "door": (str,), "host": (str,), "address": (str,), "port": (int,),
    "rule": (str,), "reason": (str,), "suggestion": (str,), "error": (str,), "bytes_up": (int,),
    "bytes_down": (int,), "duration_ms": (int, float),
}  # fmt: skip


def decode_decision(told: dict[str, Any]) -> Decision:
    known = {name: _checked(told[name], kind, name) for name, kind in _DECISION.items()}
    for name, value in known.items():
        if isinstance(value, str):
            known[name] = clean_text(value)
        else:
            _number(value, name)
    known["door"] = cast("Door", known["door"])
    return Decision(allowed=_checked(told["allowed"], bool, "allowed"), **known)


# Files.


def encode_file(info: FileInfo) -> dict[str, Any]:
    return dataclasses.asdict(info)


def _name(value: object) -> str:
    """A path below the work dir: it leads nowhere else, whatever a server may send."""
    path: str = _checked(value, str, "path")
    parts = path.split("/")
    if "\0" in path or path.startswith("/") or ".." in parts or not path:
        raise WireError(f"{path!r:.100} is not a path below the work dir")
    return path


def decode_file(told: object) -> FileInfo:
    value = _checked(told, dict, "a file")
    try:
        kind = _checked(value["kind"], str, "kind")
        if kind not in {"file", "dir", "symlink", "other"}:
            raise WireError(f"a file of kind {kind!r:.100}")
        return FileInfo(
            path=_name(value["path"]),
            kind=cast("FileKind", kind),
            size=_whole(value["size"], "size"),
            mode=_whole(value["mode"], "mode", most=0o177777),
            mtime=_number(value["mtime"], "mtime"),
        )
    except KeyError as exc:
        raise WireError(f"a file lacks {exc}") from exc
