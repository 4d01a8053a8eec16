"""A model that is a recording: plays turns from a file, over HTTP, as a chat-completions server.

    python examples/agent/model_server.py [RECORDING]

The agent beside it uses this where no real model is configured. It is a real server with real
failures, so that the agent's retries and refusals are exercised too. A recording is a list, one
entry for each request: ``status`` (200 unless given), and either ``body``, sent as it is, or
``message``, sent as the model's answer. An entry with ``expects`` is played only if that text is in
the last message of the request; a request that lacks it is answered with status 400, so a loop that
does not feed errors back to the model fails.

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
    """What both servers share: answers with a body, and no log on stderr."""

    protocol_version = "HTTP/1.1"

    def answer(self, status: int, body: str) -> None:
        """Sends it."""
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Quiet."""


class Model(Handler):
    """POST /v1/chat/completions."""

    turns: list[dict[str, Any]]
    played = 0

    def do_POST(self) -> None:
        """Plays the next turn."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = type(self)
        if self.path != "/v1/chat/completions" or not request["tools"]:
            self.answer(404, '{"error": {"message": "no such service"}}')
        elif state.played >= len(state.turns):
            self.answer(400, '{"error": {"message": "the recording has ended"}}')
        else:
            turn = state.turns[state.played]
            if turn.get("expects", "") not in (request["messages"][-1]["content"] or ""):
                expected = json.dumps(f"the model was not told: {turn['expects']}")
                self.answer(400, f'{{"error": {{"message": {expected}}}}}')
                return
            state.played += 1
            self.answer(turn.get("status", 200), turn.get("body") or answered(turn["message"]))


def answered(message: dict[str, Any]) -> str:
    """A message in the envelope that chat-completions servers send."""
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
        """Serves the table."""
        self.answer(200, json.dumps(RATES))


def load(recording: Path, **names: str) -> list[dict[str, Any]]:
    """The turns, with ``{{name}}`` replaced in them; arguments of calls become text, as sent."""
    text = recording.read_text(encoding="utf-8")
    for name, value in names.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    turns: list[dict[str, Any]] = json.loads(text)
    for turn in turns:
        for call in turn.get("message", {}).get("calls", []):
            # An argument that is text already is a malformed one, recorded as it was.
            call[1] = call[1] if isinstance(call[1], str) else json.dumps(call[1])
    return turns


@contextlib.contextmanager
def serving(handler: type[Handler], address: str) -> Iterator[str]:
    """A server in a thread; gives its ``host:port``."""
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
    """Both servers; gives the model's URL and the ``host:port`` of the service.

    The service has another loopback address than the model: inside a sandbox 127.0.0.1 is always
    the sandbox's own, while other addresses of 127.0.0.0/8 are reached by the proxy, if allowed.
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
