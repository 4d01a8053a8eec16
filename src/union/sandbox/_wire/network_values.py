"""Encode and decode the records of the network: decisions and HTTP requests."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, cast

from union.sandbox._policy.decision import Decision
from union.sandbox._policy.http_request import HttpRequest
from union.sandbox._wire.checks import checked, number
from union.sandbox._wire.errors import clean_text
from union.sandbox._wire.frames import to_json

if TYPE_CHECKING:
    from union.sandbox._policy.decision import FrontendName

__all__ = ["decode_decision", "decode_request", "encode_decision", "encode_request"]


def encode_decision(decision: Decision) -> bytes:
    return to_json({"decision": dataclasses.asdict(decision)})


def encode_request(request: HttpRequest) -> bytes:
    return to_json({"request": dataclasses.asdict(request)})


_DECISION: Final[dict[str, tuple[type, ...]]] = {
    "time": (int, float), "door": (str,), "host": (str,), "address": (str,), "port": (int,),
    "rule": (str,), "reason": (str,), "suggestion": (str,), "error": (str,), "bytes_up": (int,),
    "bytes_down": (int,), "duration_ms": (int, float),
}  # fmt: skip


def decode_decision(payload: dict[str, Any]) -> Decision:
    known = {name: checked(payload[name], kind, name) for name, kind in _DECISION.items()}
    for name, value in known.items():
        if isinstance(value, str):
            known[name] = clean_text(value)
        else:
            number(value, name)
    known["door"] = cast("FrontendName", known["door"])
    return Decision(
        allowed=checked(payload["allowed"], bool, "allowed"),
        intercepted=payload.get("intercepted") is True,  # an older server does not send it
        **known,
    )


_REQUEST: Final[dict[str, tuple[type, ...]]] = {
    "time": (int, float), "method": (str,), "host": (str,), "path": (str,), "reason": (str,),
    "suggestion": (str,), "status": (int,), "error": (str,), "bytes_up": (int,),
    "bytes_down": (int,), "duration_ms": (int, float),
}  # fmt: skip


def decode_request(payload: dict[str, Any]) -> HttpRequest:
    known = {name: checked(payload[name], kind, name) for name, kind in _REQUEST.items()}
    for name, value in known.items():
        if isinstance(value, str):
            known[name] = clean_text(value)
        else:
            number(value, name)
    flags = {name: checked(payload[name], bool, name) for name in ("allowed", "has_credential")}
    return HttpRequest(**known, **flags)
