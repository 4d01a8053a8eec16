"""The most that a call may ask of the network: its session's own, or its server's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from union.sandbox.errors import PolicyError

if TYPE_CHECKING:
    from union.sandbox._core.spec import NetworkSpec

__all__ = ["check_narrower"]

_HINTS: Final = {
    "the session": "a call may narrow the network that its session was opened with, not widen it; "
    "open the session without network_mode to choose per call",
    "the server": "the server's --network-mode and --network-allow set the most for all sessions",
}
_WIDTH: Final = {"blocked": 0, "allowlist": 1, "open": 2}


def check_narrower(asked: NetworkSpec, *, ceiling: NetworkSpec, of: str = "the session") -> None:
    """Raise ``PolicyError`` where ``asked`` would reach more than ``ceiling`` does.

    The deny-list and the proxies are not compared: they are the session's own in every call.
    """
    if _WIDTH[asked.mode] > _WIDTH[ceiling.mode]:
        raise PolicyError(
            f"network_mode={asked.mode!r} is wider than {of} allows, which is {ceiling.mode!r}",
            argument="network_mode",
            hint=_HINTS.get(of, ""),
        )
    if asked.mode == "allowlist" and ceiling.mode == "allowlist":
        from union.sandbox._policy.rules import first_uncovered

        wider = first_uncovered(asked.allow, ceiling=ceiling.allow)
        if wider is not None:
            raise PolicyError(
                f"network_allowlist: {wider.text!r} is not within what {of} allows",
                argument="network_allowlist",
                hint="it allows: " + (", ".join(e.text for e in ceiling.allow) or "nothing"),
            )
