"""Processes of a session over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from union.sandbox._wire.frames import WireError
from union.sandbox._wire.process_values import encode_processes

if TYPE_CHECKING:
    from union.sandbox._session.transport import Transport

__all__ = ["call"]

_MAX_PID: Final = 2**22


async def call(action: str, payload: dict[str, Any], transport: Transport) -> dict[str, Any]:
    """List the processes of a session, or stop one of them.

    Raises:
        SandboxUsageError: the session does not keep processes between commands.
        WireError: a field is unknown, missing or invalid.

    """
    if action == "processes/list":
        if payload:
            raise WireError("processes/list accepts no field")
        return encode_processes(await transport.processes())
    pid = payload.get("pid")
    if len(payload) != 1 or type(pid) is not int or not 1 < pid <= _MAX_PID:
        raise WireError(f"processes/stop requires the field pid, a number from 2 to {_MAX_PID}")
    return {"existed": await transport.stop_process(pid)}
