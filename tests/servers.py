"""A real sandbox-server in a process of its own, shared by the tests of a worker."""

from __future__ import annotations

import atexit
import http.client
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

# Some containers of the tests have no /var/tmp; elsewhere it is on a disk, which /tmp may not be.
_PLACE = "/var/tmp" if os.path.isdir("/var/tmp") else None


class ServerProcess:
    """A ``sandbox-server`` with a token, in a directory of its own."""

    def __init__(
        self,
        *arguments: str,
        bind: str = "127.0.0.1:0",
        token: bool = True,
        program: tuple[str, ...] = ("-m", "union.sandbox.server"),
    ) -> None:
        self.token = secrets.token_urlsafe(24) if token else None
        self.place = Path(tempfile.mkdtemp(prefix="server-test-", dir=_PLACE))
        self.work_dir = self.place / "work"
        self.log = self.place / "log"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SANDBOX_SERVER")}
        if self.token is not None:
            environment["SANDBOX_SERVER_TOKEN"] = self.token
        argv = [sys.executable, *program, "--bind", bind]
        argv += ["--work-dir", str(self.work_dir), *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=log, env=environment, cwd="/"
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        self.endpoints: list[str] = json.loads(line)["ready"]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def endpoint(self) -> str:
        return self.endpoints[0]

    @property
    def address(self) -> tuple[str, int]:
        url = urlsplit(self.endpoint)
        assert url.hostname is not None
        assert url.port is not None
        return url.hostname, url.port

    def request(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes]:
        """Send one request, with the token unless the headers override it."""
        if self.endpoint.startswith("unix:"):
            connection: http.client.HTTPConnection = _UnixConnection(self.endpoint[7:])
        else:
            connection = http.client.HTTPConnection(*self.address, timeout=20)
        if self.token is not None:
            headers = {"Authorization": f"Bearer {self.token}", **headers}
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def get_json(self, path: str) -> dict[str, Any]:
        status, body = self.request("GET", path)
        assert status == 200, (status, body)
        return json.loads(body)

    def metric(self, name: str) -> float:
        _, body = self.request("GET", "/v1/metrics")
        lines = [line for line in body.decode().splitlines() if line.split(" ")[0] == name]
        return sum(float(line.split(" ")[1]) for line in lines)

    def host_dir(self, session: str) -> str:
        """Return the path of a session's work dir on the host."""
        sessions = self.get_json("/v1/sessions")["sessions"]
        return next(s["host_dir"] for s in sessions if s["session"] == session)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            code = self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        shutil.rmtree(self.place, ignore_errors=True)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=20)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


_SHARED: list[ServerProcess] = []


def shared_server(backends: tuple[str, ...]) -> ServerProcess:
    """Return the server of the contract suite; it ends with the test process."""
    if not _SHARED:
        options = [word for backend in backends for word in ("--backend", backend)]
        _SHARED.append(ServerProcess(*options, "--allow-path", "/"))
        atexit.register(_SHARED[0].stop)
    return _SHARED[0]


def running_server() -> ServerProcess | None:
    """Return the shared server, if it was started."""
    return _SHARED[0] if _SHARED else None
