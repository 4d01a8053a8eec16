r"""A complete agent: a model decides, its tools run in a sandbox, errors are returned to the model.

    python examples/agent/agent.py [--backend B] [--allow HOST]... [--secret NAME@HOST]... [TASK]

The program calls the model from the host. Tool calls run in one session that lasts for the whole
task. A call has no network unless it requests it, and then only the allowed hosts. With
``--secret``, code can use the credential in your variable NAME at HOST, and cannot read it. Turns,
time and output are limited.

By default the model is the recording in ``model_server.py``, which fails, replies in fragments,
writes wrong code and requests a host that is not allowed. For a real model, set
``MODEL_URL`` (of a chat-completions service), ``MODEL_NAME`` and ``MODEL_KEY``.

Prints::

    model: HTTP 500, retrying
    run_shell {"command": "ls; head -2 orders.csv"}
      ok: exit code 0
    model: malformed reply, retrying
    run_python {"code": "import csv\nfor row in csv.DictReader(open('or...
      failed: KeyError: 'price'
    run_python {"code": "import urllib.request\nprint(urllib.request.ur...
      failed: rates.example was refused; allowed are: 127.0.0.2:...
    write_file {"path": "convert.py", "text": ...
      failed: the arguments are not valid JSON: ...
    write_file {"path": "convert.py", "text": "import csv, json, urllib...
      ok: wrote ... bytes
    run_shell {"command": "python convert.py", "network": true}
      ok: exit code 0
    browse {"page": "total.txt"}
      failed: there is no tool 'browse'; the tools are: run_python, ...
    read_file {"path": "total.txt"}
      ok: 118.40
    answer: All orders together come to 118.40 euros.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from http.client import HTTPException
from typing import Any

from model_server import scripted_model
from tools import SCHEMA, Tools

from union import sandbox as sb

TASK = "How much is everything in orders.csv together, in euros?"
ORDERS = b"item,amount,currency\nlamp,250,DKK\ndesk,490,SEK\nchair,40.80,EUR\n"
SYSTEM = "You solve tasks with the tools you have. Answer in one sentence once you are done."
MAX_TURNS = 12
MAX_SECONDS = 300.0
TRIES = 4


class ModelError(Exception):
    """The model returned no usable reply after all retries."""


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send one request to the model. Blocks, so it is called in a thread."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("MODEL_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        message = json.load(response)["choices"][0]["message"]
    for call in message.get("tool_calls") or []:
        if not all(isinstance(call["function"][key], str) for key in ("name", "arguments")):
            raise TypeError("a call must be text")
    return message


async def next_message(url: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the model's next message; retry temporary failures with a growing pause."""
    body = {"model": os.environ.get("MODEL_NAME", "recording"), "messages": messages}
    for attempt in range(TRIES):
        await asyncio.sleep(0.2 * attempt**2)
        if sys.stderr.isatty():
            print("\x1b[2mthinking ...\x1b[0m", file=sys.stderr)
        try:
            return await asyncio.to_thread(post, url, {**body, "tools": SCHEMA})
        except urllib.error.HTTPError as exc:
            with exc:
                detail = exc.read(500).decode("utf-8", "replace")
            if exc.code != 429 and exc.code < 500:  # A retry would not help.
                raise ModelError(f"HTTP {exc.code}: {detail}") from exc
            why = f"HTTP {exc.code}"
        except (OSError, HTTPException) as exc:
            why = f"not reached: {exc}"
        except (ValueError, LookupError, TypeError, AttributeError):
            why = "malformed reply"
        print(f"model: {why}, retrying" if attempt < TRIES - 1 else f"model: {why}", flush=True)
    raise ModelError(f"no answer in {TRIES} tries")


def shown(text: str, most: int = 70) -> str:
    """Return one short line without control characters, which could affect the terminal."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= most else f"{text[: most - 3]}..."


async def solve(task: str, url: str, tools: Tools) -> str:
    """Run the loop until the model replies without a tool call."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task},
    ]
    for _ in range(MAX_TURNS):
        message = await next_message(url, messages)
        messages.append(message)
        if not message.get("tool_calls"):
            return str(message.get("content"))
        for call in message["tool_calls"]:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            print(shown(f"{name} {arguments}"), flush=True)
            good, reply = await tools.call(name, arguments)
            messages.append({"role": "tool", "tool_call_id": call.get("id"), "content": reply})
            lines = reply.strip().splitlines() or [""]
            reason = next((line for line in lines if "was refused" in line), lines[-1])
            print("  ok:" if good else "  failed:", shown(lines[0] if good else reason), flush=True)
    raise ModelError(f"no answer in {MAX_TURNS} turns")


def entry(secret: str) -> sb.Http:
    """Return the allow-list entry for NAME@HOST: programs inside find a placeholder in NAME."""
    name, _, host = secret.partition("@")
    return sb.Http(host, auth=sb.Bearer(sb.Secret(os.environ[name])), env=name, max_requests=100)


async def main(task: str, allow: list[str | sb.Http], backend: str) -> int:
    """Open the session, stage the file, and run the loop."""
    # Refusals are sent to the model and printed below, so the library's own log is redundant.
    logging.getLogger("union.sandbox.network").setLevel(logging.ERROR)
    with ExitStack() as stack:
        url = os.environ.get("MODEL_URL", "")
        if not url:
            url, service = stack.enter_context(scripted_model())
            allow = [*allow, service]
            os.environ["no_proxy"] = "127.0.0.1"  # The user's proxy does not serve loopback.
        limits = sb.Resources(memory="1Gi", processes=64)
        async with sb.on_device.session(backend=backend, resources=limits) as sbx:
            await sbx.put_bytes("orders.csv", ORDERS)
            try:
                async with asyncio.timeout(MAX_SECONDS):
                    print("answer:", shown(await solve(task, url, Tools(sbx, allow)), 2000))
            except (ModelError, TimeoutError) as exc:
                print("gave up:", exc or f"{MAX_SECONDS:g} s have passed")
                return 1
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A model decides, a sandbox executes.")
    parser.add_argument("--backend", default="userns", help="isolation backend (default: userns)")
    parser.add_argument(
        "--allow", action="append", default=[], help="a host for calls with network access"
    )
    parser.add_argument(
        "--secret", action="append", default=[], type=entry, metavar="NAME@HOST",
        help="a credential in your environment that code may use at HOST",
    )  # fmt: skip
    parser.add_argument("task", nargs="?", default=TASK)
    args = parser.parse_args()
    sys.exit(asyncio.run(main(args.task, [*args.allow, *args.secret], args.backend)))
