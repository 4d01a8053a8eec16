"""The head that a server puts before its messages, as RFC 6455 (5.2) says it is read."""

from __future__ import annotations

import pytest

from union.sandbox.server._websocket import _message_head


@pytest.mark.spec("I3")
@pytest.mark.parametrize(
    "size, head",
    [
        (0, "8200"),
        (125, "827d"),
        (126, "827e007e"),
        (65535, "827effff"),
        (65536, "827f0000000000010000"),
        (1 << 20, "827f0000000000100000"),
    ],
)
def test_a_whole_binary_message_that_is_not_masked(size: int, head: str) -> None:
    assert _message_head(size).hex() == head
