"""Check that a requested network is not wider than its session's or its server's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from union.sandbox.errors import PolicyError

if TYPE_CHECKING:
    from union.sandbox._core.spec import NetworkSpec

__all__ = ["check_narrower"]

_HINTS: Final = {
    "the session": "a call may only narrow the network of its session; open the session without "
    "network_mode to choose the network per call",
    "the server": "the server's --network-mode and --network-allow limit the network of sessions",
}
_WIDTH: Final = {"blocked": 0, "allowlist": 1, "open": 2}


def check_narrower(
    requested: NetworkSpec, *, ceiling: NetworkSpec, of: str = "the session"
) -> None:
    """Check that ``requested`` allows nothing beyond ``ceiling``.

    The deny-list and the proxies are not compared: every call uses those of its session.

    Args:
        requested: the network of a call or session.
        ceiling: the widest network that is allowed.
        of: owner of the ceiling, for the error message: ``"the session"`` (default) or
            ``"the server"``.

    Raises:
        PolicyError: ``requested`` is wider.

    """
    if _WIDTH[requested.mode] > _WIDTH[ceiling.mode]:
        raise PolicyError(
            f"network_mode={requested.mode!r} is wider than {of} allows: {ceiling.mode!r}",
            argument="network_mode",
            hint=_HINTS.get(of, ""),
        )
    if requested.mode == "allowlist" and ceiling.mode == "allowlist":
        from union.sandbox._policy.rules import first_uncovered

        wider = first_uncovered(requested.allow, ceiling=ceiling.allow)
        if wider is not None:
            raise PolicyError(
                f"network_allowlist: {wider.text!r} is outside the allow-list of {of}",
                argument="network_allowlist",
                hint=f"{of} allows: " + (", ".join(e.text for e in ceiling.allow) or "nothing"),
            )
