"""An HTTPS server with endpoints of common APIs, which records what it receives."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass
class Received:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Api:
    """The server: its port, and the requests that it has received."""

    port: int = 0
    received: list[Received] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)

    @property
    def credentials(self) -> set[str]:
        return {request.headers.get("authorization", "") for request in self.received}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: Api
    root: Path

    def log_message(self, format, *args):  # noqa: A002 - the base class's name
        """Log nothing."""

    def _any(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if "chunked" in self.headers.get("transfer-encoding", ""):
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size + 2)[:-2]
            while self.rfile.readline().strip():
                pass
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.api.received.append(Received(self.command, self.path, headers, body))
        self._send(*self._content(body, headers))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any  # noqa: N815 - names of the base class

    def _content(self, body, headers):
        path = self.path.partition("?")[0]
        if path == "/echo":
            return 200, json.dumps({"path": self.path, **headers}).encode()
        if path == "/redirect":
            return 302, b""
        if path == "/big":
            return 200, b"x" * (1 << 20)
        if path.endswith("/chat/completions"):
            message = {"role": "assistant", "content": "pong"}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            return 200, json.dumps(
                {"id": "1", "object": "chat.completion", "created": 1, "model": "m",
                 "choices": [choice]}
            ).encode()  # fmt: skip
        if path.endswith("/v1/messages"):
            usage = {"input_tokens": 1, "output_tokens": 1}
            return 200, json.dumps(
                {"id": "1", "type": "message", "role": "assistant", "model": "m",
                 "content": [{"type": "text", "text": "pong"}], "stop_reason": "end_turn",
                 "stop_sequence": None, "usage": usage}
            ).encode()  # fmt: skip
        if path.startswith("/bucket/"):
            if self.command == "PUT":
                self.api.objects[path] = body
                return 200, b""
            return 200, self.api.objects[path]
        file = self.root / path.strip("/")
        file = file / "index.html" if file.is_dir() else file
        return (200, file.read_bytes()) if file.is_file() else (404, b"no such file")

    def _send(self, status, body):
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "https://elsewhere.test:1/")
        html = self.path.startswith("/simple")
        self.send_header("Content-Type", "text/html" if html else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    context: ssl.SSLContext

    def handle_error(self, request, client_address):
        """Ignore clients that disconnect."""

    def finish_request(self, request, client_address):
        request.settimeout(20)
        with self.context.wrap_socket(request, server_side=True) as wrapped:
            super().finish_request(wrapped, client_address)


@contextmanager
def serve_api(chain: Path, root: Path) -> Iterator[Api]:
    """Serve the API on loopback."""
    api = Api()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"api": api, "root": root}))
    server.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.context.load_cert_chain(chain)
    api.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
