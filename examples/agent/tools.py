"""The tools of the agent, executed inside a sandbox.

Every call returns a text for the model. Failures are texts too, so that the model can correct its
code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import Sequence

TIMEOUT_S = 20.0
MAX_CHARACTERS = 4_000


def _tool(name: str, description: str, required: dict[str, str], **flags: str) -> dict[str, Any]:
    properties = {
        **{key: {"type": "string", "description": text} for key, text in required.items()},
        **{key: {"type": "boolean", "description": text} for key, text in flags.items()},
    }
    schema = {"type": "object", "properties": properties, "required": list(required)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


NETWORK = "true to reach the allowed hosts in this call; there is no network otherwise"
SCHEMA = [
    _tool("run_python", "Run Python.", {"code": "the source"}, network=NETWORK),
    _tool("run_shell", "Run a shell command.", {"command": "its text"}, network=NETWORK),
    _tool("write_file", "Write a text file.", {"path": "in the work dir", "text": "all of it"}),
    _tool("read_file", "Read a text file.", {"path": "in the work dir"}),
]
_REQUIRED = {
    tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in SCHEMA
}


def clipped(text: str) -> str:
    """Return the start and the end of a long text: the last lines usually show the error."""
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools over one open session. ``allow`` lists the hosts that a call may reach."""

    sbx: sb.Session
    allow: Sequence[str | sb.Http] = ()

    async def call(self, name: str, arguments: str) -> tuple[bool, str]:
        """Execute a tool call; return whether it succeeded, and the reply for the model."""
        try:
            given = json.loads(arguments)
        except ValueError as exc:
            return False, f"the arguments are not valid JSON: {exc}"
        if name not in _REQUIRED:
            return False, f"there is no tool {name!r}; the tools are: {', '.join(_REQUIRED)}"
        if not isinstance(given, dict) or not all(
            isinstance(given.get(key), str) for key in _REQUIRED[name]
        ):
            return False, f"{name} needs these, as strings: {', '.join(_REQUIRED[name])}"
        try:
            if name == "write_file":
                data = given["text"].encode(errors="replace")
                size = await self.sbx.put_bytes(given["path"], data)
                return True, f"wrote {size} bytes"
            if name == "read_file":
                data = await self.sbx.get_bytes(given["path"], max_bytes=1_000_000)
                return True, clipped(data.decode("utf-8", "replace"))
            kind = name.removeprefix("run_")
            source = given["code"] if kind == "python" else given["command"]
            return await self._run(source, kind, network=given.get("network") is True)
        except sb.SessionClosedError:
            raise  # The model cannot fix this.
        except sb.SandboxError as exc:
            return False, f"{exc.code}: {exc}"

    async def _run(self, source: str, kind: str, *, network: bool) -> tuple[bool, str]:
        policy: dict[str, Any] = {"network_mode": "blocked"}
        if network and self.allow:
            policy = {"network_mode": "allowlist", "network_allowlist": self.allow}
        proc = await self.sbx.run(
            source, script_type=kind, timeout_s=TIMEOUT_S, max_output_bytes=1_000_000, **policy
        )
        result = proc.result()
        reply = [f"exit code {result.returncode}"]
        if result.termination_reason:
            reply.append(f"ended by: {result.termination_reason}")
        if result.truncated:
            reply.append("the output was cut")
        # Programs often hide the reason of a refusal; the sandbox records it.
        refused = dict.fromkeys(d.host for d in proc.network if not d.allowed)
        allowed = ", ".join(e.host if isinstance(e, sb.Http) else e for e in self.allow)
        reply += [f"{host} was refused; allowed are: {allowed}" for host in refused]
        reply += [
            f"{r.method} {r.host}{r.path} was refused: {r.reason}"
            for r in proc.requests
            if not r.allowed
        ]
        reply += [clipped(text) for text in (result.stdout, result.stderr) if text]
        return result.ok, "\n".join(reply)
