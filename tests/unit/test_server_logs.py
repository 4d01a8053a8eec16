"""Logs of a server: no credentials, and a rate limit."""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import TYPE_CHECKING

import pytest

from union.sandbox.server import _logs
from union.sandbox.server._auth import Verifier
from union.sandbox.server._logs import RateLimit, redact

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = "a-token-0123456789abcdef"
CREDENTIALS = {
    "bearer": f"b'Authorization: Bearer {TOKEN}\\r'",
    "bare": f"Bearer {TOKEN}",
    "basic": f"header 'Basic {TOKEN}' was refused",
    "folded": f"Bearer\\r\\n {TOKEN}",
    "capability": f"cap1.{TOKEN}.0123 is not ours",
    "url": f"http://user:{TOKEN}@proxy.example:3128/",
    "query": f"/v1/sessions?token={TOKEN}&x=1",
    "cookie": f"Cookie: token={TOKEN}",
    "header": f"X-Api-Key: {TOKEN}",
    "the token alone": f"got {TOKEN!r}, which is odd",
}


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Capture the log lines; restore the logging of the test run."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    _logs.set_up_logging("debug", Verifier.from_token(TOKEN).accepts)
    yield written
    logging.captureWarnings(capture=False)
    root.handlers[:] = before
    root.setLevel(level)


@pytest.mark.threat(157)
@pytest.mark.parametrize("case", CREDENTIALS)
@pytest.mark.parametrize("logger", ["union.sandbox.server", "aiohttp.server", "asyncio"])
def test_no_credential_is_written(lines: io.StringIO, case: str, logger: str):
    """As a message, as a value, and as the message of an exception."""
    found = logging.getLogger(logger)
    found.error("failed: %s", CREDENTIALS[case], extra={"why": CREDENTIALS[case]})
    found.error("many", extra={"values": [CREDENTIALS[case]]})
    try:
        raise ValueError(CREDENTIALS[case])
    except ValueError:
        found.exception("raised")
    assert TOKEN in json.dumps(CREDENTIALS[case]), "positive control"
    written = lines.getvalue()
    assert "failed" in written
    assert "test_server_logs.py" in written, "the traceback is kept"
    assert TOKEN not in written
    assert all(json.loads(line) for line in written.splitlines())


@pytest.mark.threat(157)
def test_exception_messages_of_other_libraries_are_removed(lines: io.StringIO):
    text = "some text"
    for name in ("aiohttp.server", "union.sandbox.server"):
        try:
            raise ValueError(text)
        except ValueError:
            logging.getLogger(name).exception("raised")
    theirs, ours = (json.loads(line)["traceback"] for line in lines.getvalue().splitlines())
    assert "some text" not in theirs
    assert "ValueError" in theirs
    assert "ValueError: some text" in ours


@pytest.mark.parametrize(
    "text", ["a plain line", "listening on 127.0.0.1:80", "https://a.example/x"]
)
def test_text_without_credentials_is_unchanged(text: str):
    assert redact(text, Verifier.from_token(TOKEN).accepts) == text


@pytest.mark.threat(153)
def test_a_repeated_warning_is_rate_limited(lines: io.StringIO):
    for _ in range(5000):
        logging.getLogger("asyncio").error("socket.accept() out of system resource")
    logging.getLogger("union.sandbox.server").error("another one")
    written = lines.getvalue().splitlines()
    assert len(written) == 21
    assert "another one" in written[-1]


@pytest.mark.threat(153)
def test_the_number_of_suppressed_records_is_reported():
    limit = RateLimit()
    records = [logging.makeLogRecord({"levelno": 40, "msg": "m", "created": 0.0})] * 100
    assert sum(limit.filter(record) for record in records) == 20
    later = logging.makeLogRecord({"levelno": 40, "msg": "m", "created": 11.0})
    assert limit.filter(later)
    assert later.suppressed == 80
    many = [logging.makeLogRecord({"levelno": 40, "msg": f"m{n}"}) for n in range(5000)]
    assert all(limit.filter(record) for record in many)
    assert len(limit._kinds) <= 256
    assert limit.filter(logging.makeLogRecord({"levelno": 20, "msg": "info is not limited"}))
