"""A server starts without the authorities that it does not need; what names them stays."""

from __future__ import annotations

import os

import pytest

from union.sandbox.server import _no_authorities


def test_what_names_the_authorities_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/etc/some.pem")
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    before = dict(os.environ)
    with _no_authorities():
        assert os.environ["SSL_CERT_FILE"] == os.environ["SSL_CERT_DIR"] == os.devnull
    assert dict(os.environ) == before

    def fails() -> None:
        with _no_authorities():
            raise ImportError("no such library")

    with pytest.raises(ImportError):
        fails()
    assert dict(os.environ) == before
