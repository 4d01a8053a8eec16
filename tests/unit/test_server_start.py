"""A server starts without the authorities that it does not need; others can still ask for them."""

from __future__ import annotations

import ssl

import pytest

from union.sandbox.server._front import _no_authorities


def test_the_authorities_are_read_again_afterwards() -> None:
    before = ssl.SSLContext.set_default_verify_paths
    with _no_authorities():
        assert ssl.SSLContext.set_default_verify_paths is not before
        ssl.create_default_context()
    assert ssl.SSLContext.set_default_verify_paths is before

    def fails() -> None:
        with _no_authorities():
            raise ImportError("no such library")

    with pytest.raises(ImportError):
        fails()
    assert ssl.SSLContext.set_default_verify_paths is before
