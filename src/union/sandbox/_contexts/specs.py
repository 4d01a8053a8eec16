"""Validated requests for contexts and cells, and the protocols of a transport that runs them."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, cast, get_args

from union.sandbox._core.resolve import resolve_run, resolve_source, validate_timeout
from union.sandbox._core.spec import NetworkSpec
from union.sandbox.constants import MAX_OUTPUT_BYTES
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from union.sandbox._contexts.values import CellEnd, MimeBundle
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.processes import ProcessInfo
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._policy.decision import Decision
    from union.sandbox._policy.http_request import HttpRequest
    from union.sandbox.errors import SandboxError

__all__ = [
    "CellSink",
    "CellSpec",
    "ContextLanguage",
    "ContextRestart",
    "ContextSpec",
    "LiveContext",
    "plain_cell",
    "resolve_cell",
    "resolve_context",
    "resolve_request",
    "resolve_set",
    "with_source",
]

ContextLanguage = Literal["python", "bash", "node"]
ContextRestart = Literal["never", "auto"]
CellOperation = Literal["run", "set", "get", "save", "restore", "discard"]
MAX_SNAPSHOTS: Final = 16
"""Saved interpreters of one context."""
MAX_CODE_BYTES: Final = 16 * 1024 * 1024
_MAX_GRACE_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSpec:
    """The validated arguments of one context."""

    language: ContextLanguage
    env: tuple[tuple[str, str], ...] = ()
    interrupt_grace_s: float = 2.0


class CellSpec(NamedTuple):
    """The validated arguments of one cell."""

    operation: CellOperation = "run"
    code: bytes = b""
    """The source; for ``set``, a JSON object."""
    name: str = ""
    """The variable of ``get``, or the snapshot of ``restore`` and ``discard``."""
    env: tuple[tuple[str, str], ...] = ()
    network: NetworkSpec = NetworkSpec()
    timeout_s: float | None = None
    max_output_bytes: int = MAX_OUTPUT_BYTES
    is_streamed: bool = False
    """Whether the caller reads the output as it arrives, beyond ``max_output_bytes`` too."""


class CellSink(Protocol):
    """Receives the output and the end of one cell. All calls come from the event loop."""

    def output(self, fd: int, data: bytes | memoryview) -> bool:
        """Receive bytes of stdout (1) or stderr (2); False pauses until ``LiveContext.resume``."""
        ...

    def display(self, bundle: MimeBundle) -> bool:
        """Receive a displayed value; False pauses until ``LiveContext.resume``."""
        ...

    def decision(self, decision: Decision) -> None:
        """Receive the decision about one connection or name lookup."""

    def request(self, request: HttpRequest) -> None:
        """Receive the record of one request to the host of an ``Http`` entry."""

    def done(self, end: CellEnd) -> None:
        """Receive the end of the cell; nothing follows."""

    def failed(self, error: SandboxError) -> None:
        """Receive the reason why the end of the cell will never be known; nothing follows."""


class LiveContext(Protocol):
    """An interpreter that a transport has started."""

    @property
    def isolation(self) -> Isolation:
        """The isolation layers of the interpreter."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether the interpreter runs."""
        ...

    @property
    def between(self) -> tuple[bytes, bytes]:
        """Output (stdout, stderr) that was written while no cell ran, up to a limit."""
        ...

    def start(self, number: int, spec: CellSpec, sink: CellSink) -> None:
        """Start a cell. The previous one has ended."""

    def interrupt(self) -> None:
        """Interrupt the running cell; kill the interpreter if it does not end."""

    def resume(self) -> None:
        """Continue after a sink returned False."""

    async def processes(self) -> tuple[ProcessInfo, ...]:
        """Return the processes of the context; none if the interpreter has ended."""
        ...

    async def restart(self) -> None:
        """End the interpreter, and start a new one."""

    async def aclose(self) -> None:
        """End the interpreter and return when it is gone."""


def resolve_context(
    session: SessionSpec, language: object, *, env: object, interrupt_grace_s: object
) -> ContextSpec:
    """Return the context that the arguments describe."""
    if language not in get_args(ContextLanguage):
        accepted = ", ".join(repr(name) for name in get_args(ContextLanguage))
        raise SandboxUsageError(
            f"language must be one of {accepted}, not {language!r:.80}", argument="language"
        )
    is_number = isinstance(interrupt_grace_s, int | float) and not isinstance(
        interrupt_grace_s, bool
    )
    grace_s = float(cast("float", interrupt_grace_s)) if is_number else math.nan
    if not 0 <= grace_s <= _MAX_GRACE_S:
        raise SandboxUsageError(
            f"interrupt_grace_s must be a number of seconds from 0 to {_MAX_GRACE_S:g}, "
            f"not {interrupt_grace_s!r:.80}",
            argument="interrupt_grace_s",
        )
    return ContextSpec(
        language=cast("ContextLanguage", language),
        env=resolve_run(session, "true", env=env).env,
        interrupt_grace_s=grace_s,
    )


def resolve_cell(
    session: SessionSpec,
    language: ContextLanguage,
    code: object,
    *,
    env: object = None,
    network_mode: object = None,
    network_allowlist: object = None,
    timeout_s: object = None,
    max_output_bytes: object = None,
) -> CellSpec:
    """Return the cell that the arguments describe, within what the session allows."""
    source = _source(language, code)
    spec = resolve_run(
        # The variables of the session are those of the interpreter already.
        dataclasses.replace(session, env=()) if session.env else session,
        source.decode("utf-8", "surrogateescape") or "0",
        env=env,
        script_type=_script_type(language),
        network_mode=network_mode,
        network_allowlist=network_allowlist,
        timeout_s=timeout_s,
        max_output_bytes=max_output_bytes,
    )
    return CellSpec(
        code=source,
        env=spec.env,
        network=spec.network,
        timeout_s=spec.timeout_s,
        max_output_bytes=spec.max_output_bytes,
    )


def plain_cell(session: SessionSpec, language: ContextLanguage) -> CellSpec | None:
    """Return the cell without code that has all defaults; None if its code must be checked."""
    plain = resolve_cell(session, language, "0")
    return None if any(entry.http is not None for entry in plain.network.allow) else plain


def with_source(plain: CellSpec, language: ContextLanguage, code: object) -> CellSpec:
    """Return a plain cell with this code: what ``resolve_cell`` returns, with less work."""
    return plain._replace(code=_source(language, code))


def _script_type(language: ContextLanguage) -> str:
    return "python" if language == "python" else "shell"


def _source(language: ContextLanguage, code: object) -> bytes:
    """Return the bytes of a cell, without the indentation that all lines of Python share."""
    if not isinstance(code, str):
        raise SandboxUsageError(
            f"code must be a string, not {type(code).__name__}", argument="code"
        )
    if "\0" in code:
        raise SandboxUsageError("code contains a NUL character", argument="code")
    if not code.strip():
        return b""
    source = resolve_source(code, _script_type(language)).encode("utf-8", "surrogateescape")
    if len(source) > MAX_CODE_BYTES:
        raise SandboxUsageError(
            f"code has {len(source)} bytes, at most {MAX_CODE_BYTES} are accepted",
            argument="code",
            hint="write the data to a file with put_bytes(), and read it in the cell",
        )
    return source


def resolve_set(language: ContextLanguage, variables: Mapping[str, Any]) -> CellSpec:
    """Return the request that assigns variables."""
    for name, value in variables.items():
        _check_name(name)
        if language == "bash" and (not isinstance(value, str) or "\0" in value):
            raise SandboxUsageError(
                f"{name} must be a string without NUL characters in a bash context, "
                f"not {value!r:.80}",
                argument=name,
            )
    try:
        code = json.dumps(variables, allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as exc:
        raise SandboxUsageError(
            f"set() accepts JSON values: {exc}",
            argument="variables",
            hint="write other values to a file with put_bytes(), and read it in a cell",
        ) from exc
    if len(code) > MAX_CODE_BYTES:
        raise SandboxUsageError(
            f"the variables have {len(code)} bytes as JSON, at most {MAX_CODE_BYTES}",
            argument="variables",
            hint="write the data to a file with put_bytes(), and read it in a cell",
        )
    return CellSpec(operation="set", code=code)


def resolve_request(
    operation: object, name: object, language: ContextLanguage, *, timeout_s: object
) -> CellSpec:
    """Return a request that has no source, such as ``get`` of a variable."""
    limit_s = validate_timeout("timeout_s", timeout_s)
    if operation == "get":
        return CellSpec(operation="get", name=_check_name(name), timeout_s=limit_s)
    if operation not in {"save", "restore", "discard"}:
        raise SandboxUsageError(
            f"unknown operation {operation!r:.80} of a {language} context", argument="operation"
        )
    if language != "python":
        raise SandboxUsageError(
            f"a {language} context cannot be saved, only a Python context can",
            argument="language",
            code="context-unsupported",
        )
    is_number = isinstance(name, str) and name.isascii() and name.isdecimal() and len(name) < 16
    if operation == "save":
        is_number = name == ""
    if not is_number:
        raise SandboxUsageError(
            f"snapshot must be one that save() returned, not {name!r:.80}", argument="snapshot"
        )
    return CellSpec(operation=operation, name=cast("str", name), timeout_s=limit_s)


def _check_name(name: object) -> str:
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii():
        raise SandboxUsageError(
            f"a variable name must be an ASCII identifier, not {name!r:.80}", argument="name"
        )
    return name
