"""A server and a browser for each module."""

from __future__ import annotations

import http.client
import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
from tests.conftest import eventually
from tests.console.browser import PROGRAM, Browser
from tests.servers import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.console.browser import Page


class ClientRun:
    """A run whose client reads all output, in a thread."""

    def __init__(self, server: ServerProcess, session: str, command: str) -> None:
        self.server = server
        self.lines: list[dict[str, Any]] = []
        self._path = f"/v1/sessions/{session}/runs"
        self._command = command
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    def _take(self) -> None:
        connection = http.client.HTTPConnection(*self.server.address, timeout=60)
        headers = {"Authorization": f"Bearer {self.server.token}"}
        try:
            connection.request("POST", self._path, self._command.encode(), headers)
            for line in connection.getresponse():
                self.lines.append(json.loads(line))
        except (OSError, http.client.HTTPException, ValueError) as exc:
            self.lines.append({"broken": repr(exc)})
        finally:
            connection.close()

    def join(self) -> Self:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self

    @property
    def end(self) -> dict[str, Any]:
        return self.join().lines[-1]

    @property
    def stdout(self) -> str:
        return "".join(t["text"] for t in self.join().lines if t.get("stream") == "stdout")


class Console:
    """A server, the sessions of a test, and the requests of a console."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.url = f"{server.endpoint}/console/"
        self._opened: list[str] = []

    def open(self, **options: object) -> str:
        name = os.urandom(16).hex()
        self._opened.append(name)
        status, body = self.server.request(
            "PUT", f"/v1/sessions/{name}", json.dumps(options).encode()
        )
        assert status == 200, body
        return name

    def run(self, session: str, command: str) -> ClientRun:
        """Start a command; return when the console API lists it."""
        before = len(self.runs(session))
        run = ClientRun(self.server, session, command)
        assert eventually(lambda: len(self.runs(session)) > before, within_s=20)
        return run

    def detail(self, session: str) -> dict[str, Any]:
        return self.server.get_json(f"/v1/console/{session}")

    def runs(self, session: str) -> list[dict[str, Any]]:
        return self.detail(session)["recorded"]

    def follow(self, session: str, run: int) -> list[dict[str, Any]]:
        """Return all lines that an observer receives, to the end of the run."""
        status, body = self.server.request("GET", f"/v1/console/{session}/runs/{run}")
        assert status == 200, body
        return [json.loads(line) for line in body.splitlines() if line]

    def is_open(self, session: str) -> bool:
        listed = self.server.get_json("/v1/console")["sessions"]
        return session in {found["session"] for found in listed}

    def clear(self) -> None:
        while self._opened:
            self.server.request("DELETE", f"/v1/sessions/{self._opened.pop()}")


@pytest.fixture(scope="module")
def own_server() -> Iterator[ServerProcess]:
    with ServerProcess("--backend", "userns", "--grace", "2", "--drain", "0.1") as server:
        yield server


@pytest.fixture
def console(own_server: ServerProcess) -> Iterator[Console]:
    found = Console(own_server)
    yield found
    found.clear()


def processes_of(place: Path) -> list[str]:
    """Return the command lines that contain a path."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                )
            except OSError:
                continue
            if str(place) in line:
                found.append(line[:200])
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("there is no chromium; Debian: apt-get install chromium")
    with Browser() as found:
        found.call("Browser.getVersion")  # it is up
        assert processes_of(found.place)  # so that the check below can fail
        yield found
    assert eventually(lambda: not processes_of(found.place)), processes_of(found.place)
    assert not found.place.exists()


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Page]:
    """Open one page for all tests of a module; loading it again is faster than a new one."""
    found = browser.page()
    yield found
    found.close()
