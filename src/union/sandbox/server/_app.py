"""The HTTP API: routes, access checks and error responses."""

from __future__ import annotations

import asyncio
import logging
import re
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from union.sandbox._core.file_errors import (
    SandboxFileExistsError,
    SandboxFileNotFoundError,
    SandboxFileTooLargeError,
)
from union.sandbox._version import __version__
from union.sandbox._wire.errors import encode_error
from union.sandbox._wire.frames import MAX_MESSAGE, PROTOCOL, VERSION, WireError
from union.sandbox._wire.values import encode_session_info
from union.sandbox.errors import (
    BackendUnavailableError,
    PolicyError,
    SandboxConnectionError,
    SandboxError,
    SandboxExecutionError,
    SandboxUsageError,
    SessionClosedError,
)
from union.sandbox.server import (
    _checkpoints,
    _console_page,
    _files,
    _http_runs,
    _inside_files,
    _processes,
)
from union.sandbox.server._auth import issue_capability
from union.sandbox.server._console_api import ConsoleApi
from union.sandbox.server._http import HEADERS, is_private, json_response, malformed, read_json
from union.sandbox.server._metrics import render
from union.sandbox.server._server_connection import ServerConnection
from union.sandbox.server._sessions import short_id
from union.sandbox.server._websocket import WebSocket

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from union.sandbox.server._auth import Authority, Grant
    from union.sandbox.server._config import Config
    from union.sandbox.server._server_session import ServerSession
    from union.sandbox.server._sessions import Sessions

__all__ = ["App"]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
_HOST: Final = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]{2,45})\]|(?P<name>[A-Za-z0-9._-]{1,255}))(?::[0-9]{1,5})?"
)
_SESSION_NAME: Final = re.compile(r"[0-9a-f]{32}")
_HEARTBEAT_S: Final = 10.0


def _status(error: SandboxError) -> int:
    by_code = {
        "busy": 503,
        "draining": 503,
        "unauthorized": 401,
        "too-large": 413,
        "origin": 403,
        "key-reused": 422,
        "session-busy": 409,
        "no-such-checkpoint": 404,
    }
    if error.code in by_code:
        return by_code[error.code]
    match error:
        case SessionClosedError() | SandboxFileNotFoundError():
            return 404
        case SandboxFileExistsError():
            return 409
        case SandboxFileTooLargeError():
            return 413
        case PolicyError():
            return 403
        case SandboxUsageError() | OSError():
            return 400
        case BackendUnavailableError():
            return 501
    return 500


def error_response(error: SandboxError) -> web.Response:
    """Return the response that reports an error."""
    response = json_response({"error": encode_error(error)}, _status(error))
    if response.status == 503:
        response.headers["Retry-After"] = "1"
    if response.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


class App:
    """Routes requests. Without a valid token, only health and the console's files are served."""

    def __init__(self, config: Config, sessions: Sessions, authority: Authority) -> None:
        self._config = config
        self._sessions = sessions
        self._authority = authority
        self._console_api = ConsoleApi(sessions)
        self.shut_down: Callable[[], None] = lambda: None
        self.admit: Callable[[web.BaseRequest, Grant], None] = lambda _, __: None
        """Called for every request with a valid key; raises if a connection limit is reached."""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Return the response to one request, also if the request fails."""
        try:
            return await self._route(request)
        except SandboxError as exc:
            self._sessions.metrics.refused[exc.code] += 1
            return error_response(exc)
        except WireError as exc:
            self._sessions.metrics.refused["malformed"] += 1
            return error_response(SandboxUsageError(str(exc), code="malformed"))
        except web.HTTPException:
            # The error responses of the library repeat headers of the request.
            self._sessions.metrics.refused["malformed"] += 1
            return error_response(malformed())
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            # A bug that one request reaches: the log has it, and the client learns nothing of it.
            _LOGGER.exception("request failed", extra={"method": _method(request)})
            error = SandboxExecutionError(
                "internal error of the server", stage="transport", code="server"
            )
            return error_response(error)
        finally:
            if (charge := request.pop("charge", None)) is not None:
                charge.release()

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            path = request.path
        except ValueError as exc:
            raise malformed() from exc
        self._check_caller(request)
        grant = self._authenticate(request)
        if grant is not None:
            self.admit(request, grant)
        if path == "/v1/health":
            return self._health(request)
        if (page := _console_page.page(request)) is not None:
            return page
        if grant is None:
            raise SandboxConnectionError(
                "invalid token" if "Authorization" in request.headers else "a token is required",
                code="unauthorized",
                hint="pass token=, or send the header 'Authorization: Bearer TOKEN'",
            )
        parts = path.removeprefix("/v1/").split("/")
        if not path.startswith("/v1/"):
            raise _not_found(request)
        if parts[0] == "sessions" and len(parts) > 1:
            return await self._route_session(request, grant, parts[1:])
        if path == "/v1/metrics" and request.method == "GET" and grant.reads_metrics:
            return await self._metrics(request)
        if not grant.is_full:
            raise _not_permitted()
        request["charge"] = self._sessions.bytes.charge(grant, None)
        if parts[0] == "console":
            return await self._console_api.handle(request, parts[1:])
        handlers: dict[tuple[str, str], Callable[[web.BaseRequest], Awaitable[Any]]] = {
            ("GET", "sessions"): self._list,
            ("POST", "run"): self._run_once,
            ("POST", "shutdown"): self._shutdown,
        }
        handler = handlers.get((request.method, "/".join(parts)))
        if handler is None:
            raise _not_found(request)
        response: web.StreamResponse = await handler(request)
        return response

    def _authenticate(self, request: web.BaseRequest) -> Grant | None:
        """Return the grant of a request; more than one ``Authorization`` header is not valid."""
        found = request.headers.getall("Authorization", [])
        return self._authority.authenticate(found[0] if found else None) if len(found) < 2 else None

    def _check_caller(self, request: web.BaseRequest) -> None:
        """Refuse requests of pages of other origins, and Host names that are not this server's.

        The second is the protection against DNS rebinding.
        """
        host = request.headers.get("Host", "")
        found = _HOST.fullmatch(host)
        if found is None and host:
            raise malformed()
        name = "" if found is None else (found["v6"] or found["name"]).lower()
        if not self._is_own_name(name):
            raise PolicyError(
                f"the Host header does not name this server: {name!r}",
                code="origin",
                hint="use the address of the server, or start it with --allow-host NAME",
            )
        origin = request.headers.get("Origin")
        own = f"{'https' if self._config.is_tls else 'http'}://{host}"
        foreign = request.headers.get("Sec-Fetch-Site", "same-origin") not in {
            "same-origin",
            "none",
        }
        if foreign or (origin is not None and origin != own):
            raise PolicyError("requests of web pages of other origins are refused", code="origin")

    def _is_own_name(self, name: str) -> bool:
        if name == "localhost" or name in self._config.allow_hosts:
            return True
        if any(bind.host == name for bind in self._config.binds):
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        # A server without a token listens on loopback only.
        return self._authority.requires_token or address.is_loopback

    # The server as a whole.

    def _health(self, request: web.BaseRequest) -> web.Response:
        if request.method not in {"GET", "HEAD"}:
            raise _not_found(request)
        status = "draining" if self._sessions.draining else "ok"
        payload = {"status": status, "version": __version__, "protocol": VERSION}
        return json_response(payload, 503 if self._sessions.draining else 200)

    async def _metrics(self, _: web.BaseRequest) -> web.Response:
        text = render(self._sessions.metrics, self._sessions)
        return web.Response(text=text, content_type="text/plain", headers=HEADERS)

    async def _list(self, _: web.BaseRequest) -> web.Response:
        return json_response(
            {"sessions": [_described(session) for session in self._sessions.all()]}
        )

    async def _shutdown(self, _: web.BaseRequest) -> web.Response:
        self.shut_down()
        return json_response({"status": "draining"}, 202)

    async def _run_once(self, request: web.BaseRequest) -> web.StreamResponse:
        return await _http_runs.run_once(request, self._sessions)

    # One session.

    async def _route_session(
        self, request: web.BaseRequest, grant: Grant, parts: list[str]
    ) -> web.StreamResponse:
        name, action = parts[0], "/".join(parts[1:])
        if not _SESSION_NAME.fullmatch(name):
            raise SandboxUsageError(
                f"a session name must be 32 hexadecimal digits, got {name[:40]!r}",
                argument="session",
            )
        if not grant.covers(name):
            raise _not_permitted()
        if not action and request.method in {"PUT", "DELETE"}:
            request["charge"] = self._sessions.bytes.charge(grant, None)
            return await self._open_or_close(request, grant, name)
        session = self._sessions.get(name)
        request["charge"] = self._sessions.bytes.charge(grant, session.bytes)
        session.hold()
        try:
            return await self._in_session(request, grant, session, action)
        finally:
            session.release()

    async def _open_or_close(
        self, request: web.BaseRequest, grant: Grant, name: str
    ) -> web.Response:
        if not grant.is_full:
            raise _not_permitted()
        if request.method == "DELETE":
            await self._sessions.close_by_name(name)
            return json_response({"closed": True})
        session = await self._sessions.open(
            name, await read_json(request), is_private=is_private(request)
        )
        return json_response(encode_session_info(session.info()))

    async def _in_session(
        self, request: web.BaseRequest, grant: Grant, session: ServerSession, action: str
    ) -> web.StreamResponse:
        match request.method, action:
            case "GET", "":
                return json_response(encode_session_info(session.info()))
            case "GET", "connect":
                return await self._connect(request, grant, session)
            case "POST", "runs":
                return await _http_runs.run_in(request, session, grant)
            case "GET", "file":
                return await _files.fetch(request, session.transport)
            case "PUT", "file":
                return await _files.store(request, session.transport)
            case "POST", "files/list" | "files/stat" | "files/mkdir" | "files/remove":
                payload = await read_json(request)
                return json_response(await _files.call(action, payload, session.transport))
            case "POST", "processes/list" | "processes/stop":
                payload = await read_json(request)
                return json_response(await _processes.call(action, payload, session.transport))
            case method, action if (method, action) in _inside_files.ACTIONS:
                return await _inside_files.handle(request, action, session.transport)
            case method, action if (method, action) in _checkpoints.ACTIONS:
                find = self._sessions.get
                return await _checkpoints.handle(request, action, session, grant, find)
            case "POST", "capability":
                if not grant.is_full:
                    raise _not_permitted()
                payload = await read_json(request)
                return json_response(issue_capability(self._authority, session.name, payload))
        raise _not_found(request)

    async def _connect(
        self, request: web.BaseRequest, grant: Grant, session: ServerSession
    ) -> web.StreamResponse:
        ws = web.WebSocketResponse(
            protocols=(PROTOCOL,),
            compress=False,
            max_msg_size=MAX_MESSAGE,
            heartbeat=min(_HEARTBEAT_S, max(self._config.grace_s / 2, 0.5)),
            decode_text=False,
            autoping=False,
        )
        if not ws.can_prepare(request):
            raise SandboxUsageError(
                "this path accepts WebSocket upgrades only",
                code="malformed",
                hint="use a WebSocket client, or POST /v1/sessions/ID/runs",
            )
        offered = request.headers.get("Sec-WebSocket-Protocol", "")
        if PROTOCOL not in {item.strip() for item in offered.split(",")}:
            raise SandboxConnectionError(
                f"this server accepts the WebSocket protocol {PROTOCOL}, got {offered[:100]!r}",
                code="version",
                hint="use the same version of unionai-sandbox on both sides",
            )
        ws.headers.update(HEADERS)
        await ws.prepare(request)
        _LOGGER.debug("client connected", extra={"session": short_id(session.name)})
        budget = self._sessions.frames.of(grant.key)
        stream = WebSocket(ws, budget)
        await ServerConnection(
            stream, session, self._sessions, grant=grant, is_private=is_private(request)
        ).serve()
        return ws


def _described(session: ServerSession) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    return {
        **session.summary(),
        "runs": [
            {
                "run": run.number,
                "kind": run.kind,
                "ended": run.over.done(),
                "seconds": round(loop.time() - run.started_at, 3),
                "held_bytes": run.log.held,
            }
            for run in session.runs.values()
        ],
    }


def _method(request: web.BaseRequest) -> str:
    """Return the method of a request for logs; unknown ones are not repeated."""
    return request.method if request.method in {"GET", "HEAD", "PUT", "POST", "DELETE"} else "other"


def _not_found(request: web.BaseRequest) -> SandboxUsageError:
    return SessionClosedError(
        f"no such endpoint: {request.method} {request.path[:100]}", code="not-found"
    )


def _not_permitted() -> PolicyError:
    return PolicyError(
        "this token permits running commands and copying files in its own session only",
        hint="use the token of the server",
    )
