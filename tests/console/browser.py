"""A headless Chromium, driven by the DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
WAIT_S = 20.0
_OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-crash-reporter",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-sync",
    "--no-proxy-server",
    "--password-store=basic",
    "--use-mock-keychain",
    # No name resolves, so no request can leave this machine.
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1 , EXCLUDE localhost",
)
# Chromium expects the pipe at file descriptors 3 and 4.
_BECOME = (
    "import os, sys; r, w, *argv = sys.argv[1:]; os.dup2(int(r), 3); os.dup2(int(w), 4);"
    "os.execv(argv[0], argv)"
)


class BrowserError(Exception):
    """A command of the browser failed."""


class Browser:
    """One browser process, in a directory of its own; `page()` opens pages."""

    def __init__(self) -> None:
        assert PROGRAM is not None
        self.place = Path(tempfile.mkdtemp(prefix="browser-test-", dir="/var/tmp"))
        options = [*_OPTIONS, f"--user-data-dir={self.place}/profile"]
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # its own sandbox does not start for root
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # Above 4, so that neither is overwritten by dup2.
        far = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
        with (self.place / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-SIc", _BECOME, *map(str, far), PROGRAM, *options, "about:blank"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=far,
                start_new_session=True,
                env={**os.environ, "HOME": str(self.place), "TMPDIR": str(self.place)},
            )
        for fd in (theirs_in, theirs_out, *far):
            os.close(fd)
        self._out = ours_out
        self._in = ours_in
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self.pages: dict[str, Page] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        rest = b""
        while data := os.read(self._in, 1 << 20):
            *messages, rest = (rest + data).split(b"\0")
            for message in messages:
                event = json.loads(message)
                if "id" in event:
                    self._answers.pop(event["id"]).put(event)
                elif (page := self.pages.get(event.get("sessionId", ""))) is not None:
                    page.events.append(event)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer: queue.Queue[dict[str, Any]] = queue.Queue()
        self._answers[number] = answer
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        try:
            found = answer.get(timeout=WAIT_S)
        except queue.Empty:
            raise TimeoutError(f"{method}: {(self.place / 'log').read_text()[-2000:]}") from None
        if "error" in found:
            raise BrowserError(f"{method}: {found['error']['message']}")
        return found["result"]

    def page(self) -> Page:
        """Open an empty page."""
        target = self.call("Target.createTarget", url="about:blank")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = Page(self, attached["sessionId"], target["targetId"])
        self.pages[page.session] = page
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.size(1280, 900)
        return page

    def close(self) -> None:
        with contextlib.suppress(TimeoutError, OSError):
            self.call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._out)
        self._reader.join(5)
        os.close(self._in)
        shutil.rmtree(self.place, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Page:
    """One page: evaluates scripts and records events."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self.browser = browser
        self.session = session
        self.target = target
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def go(self, url: str) -> None:
        """Load a page and wait for it, also if the address is unchanged."""
        self.do("void (window.before = true)")
        self.call("Page.navigate", url=url)
        self.until("!window.before && document.readyState === 'complete'", moving=True)

    def do(self, script: str) -> Any:
        """Return the value of an expression; promises are awaited."""
        message = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in message, message["exceptionDetails"]
        return message["result"].get("value")

    def until(self, script: str, *, moving: bool = False) -> Any:
        """Wait until an expression is true; ``moving``: the page may be navigating."""
        end = time.monotonic() + WAIT_S
        while True:
            try:
                if found := self.do(script):
                    return found
            except BrowserError:
                # Evaluated between two pages.
                if not moving or time.monotonic() > end:
                    raise
            assert time.monotonic() < end, (script, self.text())
            time.sleep(0.03)

    def text(self) -> str:
        """Return the visible text."""
        return self.do("document.body.innerText")

    def click(self, selector: str) -> None:
        """Click an element with the mouse."""
        at = self.do(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", clickCount=1
            )

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def events_of(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in list(self.events) if event["method"] == method]

    def requests(self) -> list[str]:
        return [
            message["request"]["url"] for message in self.events_of("Network.requestWillBeSent")
        ]

    def complaints(self) -> list[str]:
        """Return exceptions and log entries of the page."""
        thrown = [
            str(t["exceptionDetails"].get("exception", {}).get("description"))
            for t in self.events_of("Runtime.exceptionThrown")
        ]
        logged = [t["entry"]["text"] for t in self.events_of("Log.entryAdded")]
        return thrown + logged

    def picture(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self.browser.pages.pop(self.session, None)
        self.browser.call("Target.closeTarget", targetId=self.target)
