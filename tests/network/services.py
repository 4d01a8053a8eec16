"""Servers on the host's loopback that sandboxes connect to."""

from __future__ import annotations

import base64
import hashlib
import http.server
import select
import socket
import socketserver
import ssl
import subprocess
import threading
import zipfile
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = "tinyplant"
PIECE = 1 << 18


@dataclass(slots=True)
class Site:
    """One server: its port and the requests and connections it has received."""

    port: int = 0
    requests: list[str] = field(default_factory=list)
    connections: int = 0


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 512
    site: Site
    context: ssl.SSLContext | None = None

    def handle_error(self, request, client_address):
        """Ignore clients that disconnect."""

    def process_request(self, request, client_address):
        self.site.connections += 1
        super().process_request(request, client_address)

    def finish_request(self, request, client_address):
        # The handshake runs in the connection's own thread, so a stalled one blocks no other.
        if self.context is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(20)
        # Some Python releases leak a socket that disconnects before it is wrapped.
        if not request.recv(1, socket.MSG_PEEK):
            return
        with self.context.wrap_socket(request, server_side=True) as wrapped:
            super().finish_request(wrapped, client_address)


class _Web(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root = Path("/nonexistent")
    server: _Server

    def log_message(self, format, *args):  # noqa: A002 - the base class's name
        """Log nothing."""

    def do_GET(self):
        self.server.site.requests.append(f"{self.command} {self.headers['Host']} {self.path}")
        path = self.path.partition("?")[0]
        if path == "/hello":
            self._send(f"hello from {self.headers['Host']}".encode())
            return
        file = self.root / path.strip("/")
        if file.is_dir():
            file /= "index.html"
        if not file.is_file():
            self.send_error(404)
            return
        self._send(file.read_bytes(), html=file.name == "index.html")

    def do_HEAD(self):
        self.do_GET()

    def do_POST(self):
        self.server.site.requests.append(f"{self.command} {self.headers['Host']} {self.path}")
        self._send(self.rfile.read(int(self.headers["Content-Length"])))

    def _send(self, body, *, html=False):
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if html else "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Echo(socketserver.BaseRequestHandler):
    """Send back received data, and "bye" after the client has ended its side."""

    def handle(self):
        with suppress(OSError):
            while data := self.request.recv(PIECE):
                self.request.sendall(data)
            self.request.sendall(b"bye")


class _Endless(socketserver.BaseRequestHandler):
    """Send until the client disconnects."""

    def handle(self):
        with suppress(OSError):
            while True:
                self.request.sendall(b"x" * PIECE)


class _Mute(socketserver.BaseRequestHandler):
    """Send nothing and keep the connection open until the client disconnects."""

    def handle(self):
        gone = select.poll()
        gone.register(self.request, 0)
        gone.poll(20_000)


@contextmanager
def _serve(handler, context: ssl.SSLContext | None = None) -> Iterator[Site]:
    server = _Server(("127.0.0.1", 0), handler)
    server.context = context
    server.site = Site(port=server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass(frozen=True, slots=True)
class Services:
    """All servers, and the file of their certificate authority."""

    http: Site
    https: Site
    echo: Site
    endless: Site
    mute: Site
    ca: Path

    @property
    def sites(self) -> tuple[Site, ...]:
        return (self.http, self.https, self.echo, self.endless, self.mute)


@contextmanager
def services(place: Path, *, names: list[str]) -> Iterator[Services]:
    """Serve a wheel index, a git repository and a page over HTTP and TLS, and two TCP services."""
    make_index(place / "web")
    make_repository(place / "web" / "repo.git", place / "checkout")
    ca, chain, key = make_certificates(place, names)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    web = type("Web", (_Web,), {"root": place / "web"})
    with ExitStack() as stack:
        yield Services(
            stack.enter_context(_serve(web)),
            stack.enter_context(_serve(web, context)),
            stack.enter_context(_serve(_Echo)),
            stack.enter_context(_serve(_Endless)),
            stack.enter_context(_serve(_Mute)),
            ca,
        )


def make_certificates(place: Path, names: list[str]) -> tuple[Path, Path, Path]:
    """Make a certificate for ``names``; return its authority, certificate and key."""
    ca, ca_key, cert, key, request, extension = (
        place / name for name in ("ca.pem", "ca.key", "tls.pem", "tls.key", "tls.csr", "tls.ext")
    )
    extension.write_text("subjectAltName=" + ",".join(f"DNS:{name}" for name in names))
    new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl = [
        [*new, "-x509", "-days", "2", "-subj", "/CN=test authority", "-keyout", ca_key, "-out", ca,
         "-addext", "keyUsage=critical,keyCertSign"],
        [*new, "-subj", "/CN=test", "-keyout", key, "-out", request],
        ["x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial",
         "-days", "2", "-extfile", extension, "-out", cert],
    ]  # fmt: skip
    for arguments in openssl:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
    ca.chmod(0o644)
    return ca, cert, key


def make_index(web: Path) -> None:
    """Make a PEP 503 index with one wheel on the same server."""
    wheel = f"{PACKAGE}-1.0-py3-none-any.whl"
    files = {
        f"{PACKAGE}.py": "answer = 42\n",
        f"{PACKAGE}-1.0.dist-info/METADATA": "Metadata-Version: 2.1\n"
        f"Name: {PACKAGE}\nVersion: 1.0\n",
        f"{PACKAGE}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={_digest(text)},{len(text)}\n" for name, text in files.items())
    files[f"{PACKAGE}-1.0.dist-info/RECORD"] = f"{record}{PACKAGE}-1.0.dist-info/RECORD,,\n"
    (web / "simple" / PACKAGE).mkdir(parents=True)
    (web / "files").mkdir()
    with zipfile.ZipFile(web / "files" / wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    link = f'<!doctype html><a href="/files/{wheel}">{wheel}</a>'
    (web / "simple" / PACKAGE / "index.html").write_text(link)


def _digest(text: str) -> str:
    raw = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def make_repository(bare: Path, checkout: Path) -> None:
    """Make a repository that any web server can serve."""
    who = ["-c", "user.name=t", "-c", "user.email=t@t.test", "-c", "init.defaultBranch=main"]
    checkout.mkdir()
    (checkout / "file").write_text("from the repository\n")
    for arguments in (
        ["-C", str(checkout), "init", "-q"],
        ["-C", str(checkout), "add", "file"],
        ["-C", str(checkout), "commit", "-q", "-m", "first"],
        ["clone", "-q", "--bare", str(checkout), str(bare)],
        ["-C", str(bare), "update-server-info"],
    ):
        subprocess.run(["git", *who, *arguments], check=True, capture_output=True)


class _HttpProxy(socketserver.StreamRequestHandler):
    """A proxy for CONNECT only that connects every name to loopback."""

    server: _Server

    def handle(self):
        line = self.rfile.readline().decode("latin-1")
        while self.rfile.readline().strip():
            pass
        self.server.site.requests.append(line.strip())
        method, target, _ = line.split()
        if method != "CONNECT":
            self.wfile.write(b"HTTP/1.1 405 No\r\nContent-Length: 0\r\n\r\n")
            return
        with socket.create_connection(("127.0.0.1", int(target.rpartition(":")[2]))) as far:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            _relay(self.connection, far)


class _SocksProxy(socketserver.StreamRequestHandler):
    """SOCKS5 by name, without a login; leads every name to loopback."""

    server: _Server

    def handle(self):
        self.rfile.read(self.rfile.read(2)[1])
        self.wfile.write(b"\x05\x00")
        kind = self.rfile.read(4)[3]
        raw = self.rfile.read(self.rfile.read(1)[0] if kind == 3 else 4)
        port = int.from_bytes(self.rfile.read(2), "big")
        name = raw.decode() if kind == 3 else socket.inet_ntoa(raw)
        self.server.site.requests.append(f"{name}:{port}")
        with socket.create_connection(("127.0.0.1", port)) as far:
            self.wfile.write(b"\x05\x00\x00\x01" + bytes(6))
            _relay(self.connection, far)


def _relay(one: socket.socket, two: socket.socket) -> None:
    def carry(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=carry, args=(one, two), daemon=True)
    thread.start()
    carry(two, one)
    thread.join()


@contextmanager
def upstream_proxy(kind: str) -> Iterator[Site]:
    """A caller's own proxy, of either kind."""
    with _serve(_HttpProxy if kind == "http" else _SocksProxy) as site:
        yield site
