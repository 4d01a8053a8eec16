"""A recorded model: replays turns from a file over HTTP, as a chat-completions server.

    python examples/agent/model_server.py [RECORDING]

The agent uses it if no real model is configured. It is a real server with real failures, so the
agent's retries and refusals are exercised too. A recording is a list with one entry per request:
``status`` (default 200), and either ``body``, sent unchanged, or ``message``, sent as the model's
reply. An entry with ``expects`` is replayed only if the last message of the request has that text;
otherwise the reply has status 400, so a loop that does not return errors to the model fails.

Prints::

    model at http://127.0.0.1:...
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDING = Path(__file__).with_name("recording.json")
RATES = {"EUR": 1.0, "DKK": 0.134, "SEK": 0.09}


class Handler(BaseHTTPRequestHandler):
    """Common parts of both servers: replies with a body, and no log on stderr."""

    protocol_version = "HTTP/1.1"

    def reply(self, status: int, body: str) -> None:
        """Send the reply."""
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log nothing."""


class Model(Handler):
    """POST /v1/chat/completions."""

    turns: list[dict[str, Any]]
    played = 0

    def do_POST(self) -> None:
        """Replay the next turn."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = type(self)
        if self.path != "/v1/chat/completions" or not request["tools"]:
            self.reply(404, '{"error": {"message": "no such service"}}')
        elif state.played >= len(state.turns):
            self.reply(400, '{"error": {"message": "the recording has ended"}}')
        else:
            turn = state.turns[state.played]
            if turn.get("expects", "") not in (request["messages"][-1]["content"] or ""):
                expected = json.dumps(f"the request lacks: {turn['expects']}")
                self.reply(400, f'{{"error": {{"message": {expected}}}}}')
                return
            state.played += 1
            self.reply(turn.get("status", 200), turn.get("body") or answered(turn["message"]))


def answered(message: dict[str, Any]) -> str:
    """Return a message in the format of chat-completions servers."""
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": given}}
        for number, (name, given) in enumerate(message.get("calls", []))
    ]
    sent = {"role": "assistant", "content": message.get("content")}
    if calls:
        sent["tool_calls"] = calls
    finish = "tool_calls" if calls else "stop"
    return json.dumps({"choices": [{"index": 0, "message": sent, "finish_reason": finish}]})


class Rates(Handler):
    """GET /rates.json: a service that sandboxed code may be allowed to reach."""

    def do_GET(self) -> None:
        """Send the table."""
        self.reply(200, json.dumps(RATES))


def load(recording: Path, **names: str) -> list[dict[str, Any]]:
    """Return the turns with each ``{{name}}`` replaced, and call arguments as JSON text."""
    text = recording.read_text(encoding="utf-8")
    for name, value in names.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    turns: list[dict[str, Any]] = json.loads(text)
    for turn in turns:
        for call in turn.get("message", {}).get("calls", []):
            # An argument that is already text is malformed on purpose.
            call[1] = call[1] if isinstance(call[1], str) else json.dumps(call[1])
    return turns


@contextlib.contextmanager
def serving(handler: type[Handler], address: str) -> Iterator[str]:
    """Run a server in a thread; yield its ``host:port``."""
    with ThreadingHTTPServer((address, 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"{address}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def scripted_model(recording: Path = RECORDING) -> Iterator[tuple[str, str]]:
    """Run both servers; yield the model's URL and the ``host:port`` of the service.

    The service uses another loopback address than the model: inside a sandbox 127.0.0.1 is always
    the sandbox's own, while the proxy reaches other addresses of 127.0.0.0/8 if they are allowed.
    """
    with serving(Rates, "127.0.0.2") as service:
        model = type("Playing", (Model,), {"turns": load(recording, service=service)})
        with serving(model, "127.0.0.1") as where:
            yield f"http://{where}/v1/chat/completions", service


if __name__ == "__main__":
    with scripted_model(*map(Path, sys.argv[1:2])) as (url, _):
        print(f"model at {url}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
