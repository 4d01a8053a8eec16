"""Validate keyword arguments and resolve them, with defaults, to SessionSpec and RunSpec.

Every invalid argument is rejected here, before anything is created. The error names the argument,
the value received and the accepted values.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from union.sandbox import constants
from union.sandbox._core.literals import NetworkMode, Persist, Shell
from union.sandbox._core.resources import limits_from
from union.sandbox._core.spec import (
    WARM,
    CallPosture,
    NetworkSpec,
    RunSpec,
    SessionSpec,
    StreamMode,
)
from union.sandbox._policy.ceiling import check_narrower
from union.sandbox.constants import Stream
from union.sandbox.errors import PolicyError, SandboxUsageError

if TYPE_CHECKING:
    from union.sandbox._policy.rules import Entry

__all__ = [
    "resolve_run",
    "resolve_session",
    "validate_output_cap",
    "validate_timeout",
    "validate_window",
]

_MODES: Final[tuple[str, ...]] = get_args(NetworkMode)
_PERSIST: Final[tuple[str, ...]] = get_args(Persist)
_SHELLS: Final[tuple[str, ...]] = get_args(Shell)
_MAX_ENV_BYTES: Final = 1024 * 1024
_MAX_ARG_BYTES: Final = 128 * 1024 - 1
"""The kernel's limit on one argument or one variable (MAX_ARG_STRLEN)."""
_MAX_WARM: Final = 32
_MAX_CELLS: Final = 65535
"""The kernel stores rows and columns of a terminal window in 16 bits each."""
_DEFAULT_WINDOW: Final = (24, 80)
_MAX_TIMEOUT_S: Final = 100 * 365 * 86400
_STREAMS: Final[dict[object, StreamMode]] = {
    Stream.PIPE: "pipe",
    Stream.INHERIT: "inherit",
    Stream.DEVNULL: "devnull",
}


def _usage_error(
    argument: str, value: object, accepted: str, *, hint: str = ""
) -> SandboxUsageError:
    from union.sandbox._core.suggestions import remedy

    shown = repr(value)
    if len(shown) > 120:
        shown = shown[:117] + "..."
    hint = hint or remedy(argument, value)
    return SandboxUsageError(
        f"{argument} must be {accepted}, not {shown}", argument=argument, hint=hint
    )


def validate_timeout(argument: str, value: object) -> float | None:
    """Return a positive, finite number of seconds, or None for no limit."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _usage_error(argument, value, "a number of seconds, or None for no limit")
    if not 0 < value <= _MAX_TIMEOUT_S:  # also false for NaN
        raise _usage_error(
            argument, value, "a positive, finite number of seconds, or None for no limit"
        )
    return float(value)


_Variables = tuple[tuple[str, str], ...]


def _with(env: _Variables, more: _Variables) -> _Variables:
    return tuple({**dict(env), **dict(more)}.items())


def _environment(value: object) -> _Variables:
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise _usage_error("env", value, "a mapping of str to str")
    size = 0
    for key, item in value.items():
        if not isinstance(key, str) or not isinstance(item, str):
            raise _usage_error("env", {key: item}, "a mapping of str to str")
        if not key or "=" in key or "\0" in key:
            raise _usage_error("env", key, "names that are not empty and contain no '=' and no NUL")
        if "\0" in item:
            raise SandboxUsageError(
                f"env: the value of {key!r} contains a NUL byte", argument="env"
            )
        length = len(_encoded("env", f"{key}={item}"))
        size += length
        if length > _MAX_ARG_BYTES:
            raise SandboxUsageError(
                f"env: {key!r} has {length} bytes; the kernel's limit is {_MAX_ARG_BYTES} "
                "for one variable",
                argument="env",
                hint="put large values into a file with put_bytes()",
            )
    if size > _MAX_ENV_BYTES:
        raise SandboxUsageError(
            f"env has {size} bytes in total; the limit is {_MAX_ENV_BYTES}",
            argument="env",
            hint="put large values into a file with put_bytes()",
        )
    return tuple(value.items())


def _encoded(argument: str, text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as exc:
        raise SandboxUsageError(
            f"{argument} contains a character that cannot be encoded: {exc.reason} at {exc.start}",
            argument=argument,
        ) from exc


def _choice(argument: str, value: object, accepted: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in accepted:
        from union.sandbox._core.suggestions import near

        one_of = "one of " + ", ".join(repr(a) for a in accepted)
        raise _usage_error(argument, value, one_of, hint=near(argument, value, accepted))
    return value


def _flag(argument: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _usage_error(argument, value, "True or False")
    return value


def _paths(argument: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _usage_error(argument, value, "a list of absolute paths")
    return tuple(_absolute(argument, item) for item in value)


def _absolute(argument: str, value: object) -> str:
    fspath = getattr(type(value), "__fspath__", None)
    path = fspath(value) if fspath is not None else value
    if not isinstance(path, str) or "\0" in path or not path.startswith("/"):
        raise _usage_error(argument, value, "an absolute path")
    _encoded(argument, path)
    return path


def _entries(argument: str, value: object) -> tuple[Entry, ...]:
    if value is None:
        return ()
    from union.sandbox._policy.rules import parse_entries

    return parse_entries(value, argument=argument)


def _network(
    mode: object,
    allowlist: object,
    denylist: object,
    proxy_url: object = None,
    socks_url: object = None,
    *,
    relayed: bool = False,
) -> NetworkSpec:
    is_given = mode is not None
    network_mode = cast(
        "NetworkMode", _choice("network_mode", mode if is_given else "blocked", _MODES)
    )
    if allowlist is not None and network_mode != "allowlist":
        raise PolicyError(
            f"network_allowlist needs network_mode='allowlist'; the mode is {network_mode!r}",
            argument="network_allowlist",
            hint="pass network_mode='allowlist' as well",
        )
    if network_mode == "allowlist" and allowlist is None:
        raise PolicyError(
            "network_mode='allowlist' needs network_allowlist",
            argument="network_allowlist",
            hint="pass a list of hosts; to allow nothing, use network_mode='blocked'",
        )
    for name, value in (
        ("network_denylist", denylist),
        ("network_proxy_url", proxy_url),
        ("network_socks_url", socks_url),
    ):
        if value is not None and is_given and network_mode == "blocked":
            raise PolicyError(
                f"{name} has no effect with network_mode='blocked'",
                argument=name,
                hint="use network_mode='open' or 'allowlist'",
            )
    return NetworkSpec(
        mode=network_mode,
        allow=_entries("network_allowlist", allowlist),
        deny=_entries("network_denylist", denylist),
        proxy_url=_url("network_proxy_url", proxy_url, ("http://",)),
        socks_url=_url("network_socks_url", socks_url, ("socks5://", "socks5h://")),
        relayed=relayed,
    )


def _url(argument: str, value: object, schemes: tuple[str, ...]) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.startswith(schemes):
        raise PolicyError(
            f"{argument} must be a URL that starts with {' or '.join(schemes)}, not {value!r}",
            argument=argument,
        )
    return value


def resolve_session(
    *,
    backend: object,
    backends: Sequence[str],
    host_work_dir: object = None,
    work_dir_name: object = None,
    network_mode: object = None,
    network_allowlist: object = None,
    network_denylist: object = None,
    network_proxy_url: object = None,
    network_socks_url: object = None,
    timeout_s: object = None,
    env: object = None,
    read_only_paths: object = (),
    read_write_paths: object = (),
    resources: object = None,
    strict: object = False,
    warm: object = True,
    preload: object = (),
    persist: object = "workdir",
    shell: object = None,
) -> SessionSpec:
    """Return the session that the arguments describe; raise an error for an invalid one."""
    work_dir = None if host_work_dir is None else _absolute("host_work_dir", host_work_dir)
    chosen = _choice("backend", backend, backends)
    limits = limits_from(resources)
    # "default" is the default backend of the server, which checks this itself.
    if limits.gpus and chosen not in {"bubblewrap", "default"}:
        raise SandboxUsageError(
            f"resources: the {chosen!r} backend does not support GPUs; use backend='bubblewrap'",
            argument="resources",
        )
    _check_enforceable(chosen, allowlist=network_allowlist, denylist=network_denylist)
    return SessionSpec(
        backend=chosen,
        host_work_dir=work_dir,
        work_dir_name=_work_dir_name(work_dir_name, chosen),
        network=_network(
            network_mode,
            network_allowlist,
            network_denylist,
            network_proxy_url,
            network_socks_url,
            relayed=persist == "machine",
        ),
        network_is_ceiling=network_mode is not None,
        timeout_s=validate_timeout("timeout_s", timeout_s),
        env=_environment(env),
        read_only_paths=_paths("read_only_paths", read_only_paths),
        read_write_paths=_paths("read_write_paths", read_write_paths),
        limits=limits,
        strict=_flag("strict", strict),
        warm=_warm(warm),
        preload=_modules(preload),
        persist=_persist(persist, chosen),
        shell=None if shell is None else cast("Shell", _choice("shell", shell, _SHELLS)),
    )


_SYSTEM: Final = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
    "/etc", "/proc", "/sys", "/dev", "/run", "/boot",
)  # fmt: skip
"""Directories with a purpose inside, which a work dir can neither replace nor lie below."""
_WITHOUT_MOUNTS: Final = frozenset({"landlock", "none", "sandbox-exec"})


def _work_dir_name(value: object, backend: str) -> str | None:
    if value is None:
        return None
    name = _absolute("work_dir_name", value)
    if backend in _WITHOUT_MOUNTS:
        raise SandboxUsageError(
            f"work_dir_name: the {backend!r} backend cannot show the work dir under another name",
            argument="work_dir_name",
            hint="leave it out, or use another backend",
        )
    is_plain = all(part not in {"", ".", ".."} for part in name[1:].split("/"))
    of_system = any(f"{name}/".startswith(f"{top}/") for top in _SYSTEM)
    if not is_plain or of_system or name == "/tmp":  # noqa: S108 - a name inside
        raise _usage_error(
            "work_dir_name",
            value,
            "an absolute path without '.' and '..', outside the system's directories",
            hint='for example "/workspace"',
        )
    return name


def _persist(value: object, backend: str) -> Persist:
    chosen = cast("Persist", _choice("persist", value, _PERSIST))
    if chosen == "machine" and backend in _WITHOUT_MOUNTS:
        raise SandboxUsageError(
            f"persist='machine' needs namespaces, which the {backend!r} backend does not have: its "
            "processes cannot be kept apart from one command to the next",
            argument="persist",
            hint="use backend='bubblewrap' or backend='userns', or leave persist out",
        )
    return chosen


def _modules(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _usage_error("preload", value, "a list of module names")
    for name in value:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            raise _usage_error("preload", name, "a list of module names")
    return tuple(value)


def _warm(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value <= _MAX_WARM:
        raise _usage_error(
            "warm", value, f"True, False, or a number of sandboxes from 0 to {_MAX_WARM}"
        )
    return WARM if value is True else int(value)


def _stream(argument: str, value: object) -> StreamMode:
    if value is None:
        return "collect"
    if isinstance(value, bool):
        return "pipe" if value else "devnull"
    if isinstance(value, Stream) and value in _STREAMS:
        return _STREAMS[value]
    accepted = "True, False, PIPE, INHERIT or DEVNULL"
    if argument == "stderr":
        accepted = "True, False, PIPE, INHERIT, DEVNULL or STDOUT"
    raise _usage_error(argument, value, accepted)


def _stdin(value: object) -> bytes | Literal["pipe"] | None:
    if value is None or value is False or value is Stream.DEVNULL:
        return None
    if value is True or value is Stream.PIPE:
        return "pipe"
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise _usage_error("stdin", value, "bytes, PIPE, DEVNULL or None")


def _command(cmd: object, script_type: object) -> dict[str, Any]:
    kind = _choice("script_type", script_type, ("shell", "python"))
    if isinstance(cmd, str):
        if not cmd.strip():
            raise _usage_error("cmd", cmd, "a command that is not empty")
        if "\0" in cmd:
            raise SandboxUsageError("cmd contains a NUL character", argument="cmd")
        _encoded("cmd", cmd)
        if kind == "python":
            return {"kind": "python", "text": _without_margin(cmd)}
        return {"kind": "shell", "text": cmd}
    if isinstance(cmd, bytes) or not isinstance(cmd, Sequence):
        raise _usage_error("cmd", cmd, "a string, or a list of strings")
    if kind == "python":
        raise SandboxUsageError(
            "cmd must be source text when script_type='python', not a list", argument="cmd"
        )
    if not cmd or not cmd[0]:
        raise _usage_error("cmd", cmd, "a list whose first element names a program")
    for item in cmd:
        if not isinstance(item, str):
            raise _usage_error("cmd", item, "a list of strings")
        if "\0" in item:
            raise SandboxUsageError("cmd contains a NUL character", argument="cmd")
        if len(_encoded("cmd", item)) > _MAX_ARG_BYTES:
            raise SandboxUsageError(
                f"cmd: one argument exceeds the kernel's limit of {_MAX_ARG_BYTES} bytes",
                argument="cmd",
                hint="pass it as a string, through stdin, or in a file with put_bytes()",
            )
    return {"kind": "argv", "argv": tuple(cmd)}


def resolve_source(source: str, script_type: str) -> str:
    """Return the text of a command that the arguments of ``resolve_run`` describe."""
    text: str = _command(source, script_type)["text"]
    return text


def _without_margin(source: str) -> str:
    """Remove the indentation that all lines share."""
    blank = source[: len(source) - len(source.lstrip())]
    if not blank or blank.endswith("\n"):
        # The first line has no indentation, so nothing is shared; skip searching a long script.
        return source
    return textwrap.dedent(source)


def _run_network(spec: SessionSpec, mode: object, allowlist: object) -> NetworkSpec:
    """Return the network of a call: its own mode and list within what the session allows.

    The deny-list and the proxies stay the session's. A session that was opened with a mode is the
    ceiling of its calls; without one, a call may request any mode.
    """
    session = spec.network
    mode = session.mode if mode is None else mode
    if mode == session.mode == "allowlist" and allowlist is None:
        return session
    requested = _network(mode, allowlist, None)
    _check_enforceable(spec.backend, allowlist=allowlist)
    if spec.network_is_ceiling:
        check_narrower(requested, ceiling=session)
    if requested.mode == "blocked":
        return requested
    return NetworkSpec(
        mode=requested.mode,
        allow=requested.allow,
        deny=session.deny,
        proxy_url=session.proxy_url,
        socks_url=session.socks_url,
        relayed=session.relayed,
    )


def _check_hidden(network: NetworkSpec, command: dict[str, Any], env: _Variables) -> None:
    """Raise if a command or a variable contains a secret that an ``Http`` entry hides."""
    for entry in network.allow:
        secret = None if entry.http is None else entry.http.callers_secret
        if secret is None:
            continue
        value = secret.reveal()
        for name, text in env:
            if value in text:
                raise PolicyError(
                    f"env: {name!r} contains the secret of {entry.text}, which code inside must "
                    "not read",
                    argument="env",
                    hint=f"leave it out; Http(..., env={name!r}) sets it to a placeholder",
                )
        if value in command.get("text", "") or any(value in a for a in command.get("argv", ())):
            raise PolicyError(
                f"cmd contains the secret of {entry.text}, which code inside must not read",
                argument="cmd",
            )


def _check_enforceable(backend: str, **lists: object) -> None:
    """Raise ``PolicyError`` for a list that the backend would accept and not enforce."""
    if backend != "none":
        return
    for name, value in lists.items():
        if value is not None:
            raise PolicyError(
                f"network_{name} cannot be enforced by backend='none', which isolates nothing",
                argument=f"network_{name}",
                hint="use backend='bubblewrap' or 'userns', or leave the list out",
            )


def resolve_run(
    session: SessionSpec,
    cmd: object,
    *,
    stdout: object = None,
    stderr: object = None,
    stdin: object = None,
    env: object = None,
    cwd: object = None,
    script_type: object = "shell",
    network_mode: object = None,
    network_allowlist: object = None,
    timeout_s: object = None,
    background: object = False,
    pty: object = False,
    max_output_bytes: object = None,
    resources: object = None,
    read_only_paths: object = (),
    read_write_paths: object = (),
) -> RunSpec:
    """Return the command that the arguments describe, with the defaults of the session."""
    if cwd is not None:
        fspath = getattr(type(cwd), "__fspath__", None)
        cwd = fspath(cwd) if fspath is not None else cwd
        if not isinstance(cwd, str) or not cwd or "\0" in cwd:
            raise _usage_error("cwd", cwd, "a path")
        _encoded("cwd", cwd)
        if not cwd.startswith("/") and ".." in cwd.split("/"):
            raise _usage_error(
                "cwd",
                cwd,
                "a path below the work dir without '..', or an absolute path visible inside",
            )
    window = None if pty is False else _pty(pty, stdout, stderr)
    call = None
    if resources is not None or read_only_paths != () or read_write_paths != ():
        call = _call(session, resources, read_only_paths, read_write_paths)
    merged = stderr is Stream.STDOUT
    # Values that were not given need no check; each call counts here.
    output: StreamMode = "collect" if stdout is None else _stream("stdout", stdout)
    errors: StreamMode = "collect" if window is None and not merged else "devnull"
    if errors == "collect" and stderr is not None:
        errors = _stream("stderr", stderr)
    command = _command(cmd, script_type)
    variables = session.env if env is None else _with(session.env, _environment(env))
    network = session.network
    if network_mode is not None or network_allowlist is not None:
        network = _run_network(session, network_mode, network_allowlist)
    if network.allow:
        _check_hidden(network, command, variables)
    return RunSpec(
        **command,
        env=variables,
        cwd=cwd,
        stdout=output,
        stderr=errors,
        stdin=None if stdin is None else _stdin(stdin),
        network=network,
        timeout_s=None if timeout_s is None else validate_timeout("timeout_s", timeout_s),
        background=False if background is False else _flag("background", background),
        pty=window,
        max_output_bytes=validate_output_cap(max_output_bytes),
        call=call,
        merged=merged and output != "devnull",
    )


def _call(
    session: SessionSpec, resources: object, read_only: object, read_write: object
) -> CallPosture | None:
    """Return what the call changes about files and limits; None if it changes nothing."""
    from union.sandbox._core.resolve_call import limits_of_call, spec_of_call

    call = CallPosture(
        read_only_paths=_paths("read_only_paths", read_only),
        read_write_paths=_paths("read_write_paths", read_write),
        limits=limits_of_call(resources, session.limits),
    )
    return None if spec_of_call(session, call) == session else call


def _pty(value: object, stdout: object, stderr: object) -> tuple[int, int] | None:
    if value is False or value is None:
        return None
    if stderr is not None:
        raise SandboxUsageError(
            "stderr cannot be given with pty: a terminal has one output, which is stdout",
            argument="stderr",
        )
    if _stream("stdout", stdout) == "devnull":
        raise SandboxUsageError(
            "stdout cannot be discarded with pty: the output of a terminal must be read",
            argument="stdout",
            hint="leave it out, or use PIPE or INHERIT",
        )
    if value is True:
        return _DEFAULT_WINDOW
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != 2:
        raise _usage_error("pty", value, "True, False, or a pair (rows, columns)")
    return validate_window("pty", *value)


def validate_window(argument: str, rows: object, cols: object) -> tuple[int, int]:
    """Return the size of a terminal window as ``(rows, columns)``."""
    for value in (rows, cols):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_CELLS:
            raise _usage_error(
                argument, (rows, cols), f"rows and columns, each from 1 to {_MAX_CELLS}"
            )
    return cast("tuple[int, int]", (rows, cols))


def validate_output_cap(value: object) -> int:
    """Return how many bytes of one stream to collect; None for the default."""
    if value is None:
        return constants.MAX_OUTPUT_BYTES
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        wanted = "a whole number of bytes, or None for the default"
        raise _usage_error("max_output_bytes", value, wanted)
    return value
