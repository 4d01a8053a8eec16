"""A call may narrow the network of its session and never widen it."""

from __future__ import annotations

import pytest

from union.sandbox._core.resolve import resolve_session
from union.sandbox._policy.ceiling import check_narrower
from union.sandbox.errors import PolicyError


def network(mode: str, *allow: str):
    options = {"network_allowlist": list(allow)} if mode == "allowlist" else {}
    return resolve_session(
        backend="userns", backends=("userns",), network_mode=mode, **options
    ).network


BLOCKED, OPEN = network("blocked"), network("open")
LIST = network("allowlist", "a.example", "*.b.example:443", "10.0.0.0/8")

NARROWER = [
    (BLOCKED, BLOCKED),
    (BLOCKED, LIST),
    (BLOCKED, OPEN),
    (LIST, OPEN),
    (OPEN, OPEN),
    (LIST, LIST),
    (network("allowlist"), LIST),
    (network("allowlist", "a.example:80"), LIST),
    (network("allowlist", "x.b.example:443"), LIST),
    (network("allowlist", "10.1.0.0/16:22", "10.2.3.4"), LIST),
]
WIDER = [
    (LIST, BLOCKED, "network_mode"),
    (OPEN, BLOCKED, "network_mode"),
    (OPEN, LIST, "network_mode"),
    (network("allowlist", "b.example:443"), LIST, "network_allowlist"),
    (network("allowlist", "x.b.example"), LIST, "network_allowlist"),
    (network("allowlist", "x.a.example"), LIST, "network_allowlist"),
    (network("allowlist", "0.0.0.0/1"), LIST, "network_allowlist"),
    (network("allowlist", "a.example"), network("allowlist", "a.example:80"), "network_allowlist"),
]


@pytest.mark.spec("C9")
@pytest.mark.parametrize("requested, ceiling", NARROWER)
def test_an_equal_or_narrower_network_is_accepted(requested, ceiling):
    check_narrower(requested, ceiling=ceiling)


@pytest.mark.spec("C9")
@pytest.mark.parametrize("requested, ceiling, argument", WIDER)
def test_a_wider_network_is_refused(requested, ceiling, argument):
    with pytest.raises(PolicyError, match=argument) as caught:
        check_narrower(requested, ceiling=ceiling)
    assert caught.value.argument == argument
