"""Operation of a server: the printed endpoint, the console at /, metrics and their own token."""

from __future__ import annotations

import http.client
import json
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.servers import ServerProcess

from union.sandbox.server import _main, _metrics

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    file = tmp_path_factory.mktemp("metrics") / "token"
    file.write_text("scrape-only-token-of-this-test\n")
    file.chmod(0o600)
    server = ServerProcess("--backend", "userns", "--metrics-token-file", str(file))
    yield server
    server.stop()


SCRAPER = {"Authorization": "Bearer scrape-only-token-of-this-test"}


@pytest.mark.spec("I1")
def test_the_scrape_key_reads_metrics_and_nothing_else(scraped: ServerProcess):
    assert scraped.request("GET", "/v1/metrics", **SCRAPER)[0] == 200
    refused = [
        ("GET", "/v1/sessions"),
        ("POST", "/v1/run"),
        ("POST", "/v1/shutdown"),
        ("POST", "/v1/metrics"),
        ("GET", "/v1/console/state"),
        ("PUT", f"/v1/sessions/{'a' * 32}"),
        ("POST", f"/v1/sessions/{'a' * 32}/runs"),
    ]
    for method, path in refused:
        assert scraped.request(method, path, b"{}", **SCRAPER)[0] in {403, 404}, path
    assert scraped.request("GET", "/v1/metrics", Authorization="Bearer other")[0] == 401
    assert scraped.request("GET", "/v1/metrics")[0] == 200  # the server's own token


def test_the_root_leads_to_the_console(scraped: ServerProcess):
    connection = http.client.HTTPConnection(*scraped.address, timeout=10)
    connection.request("GET", "/")
    answer = connection.getresponse()
    assert (answer.status, answer.headers["Location"]) == (302, "console/")
    answer.read()
    connection.request("GET", "/console/")
    assert connection.getresponse().status == 200
    connection.close()


def test_metrics_are_exact():
    metrics = _metrics.Metrics(started=1750000000.25, bytes_sent=2**53 + 1, runs_started=1234567)

    class Sessions(SimpleNamespace):
        def __len__(self) -> int:
            return 3

    sessions: Any = Sessions(running=(), draining=False, buffers=SimpleNamespace(held=0))
    text = _metrics.render(metrics, sessions)
    values = dict(re.findall(r"^(sandbox_\w+) (\S+)$", text, re.MULTILINE))
    assert values["sandbox_sent_bytes_total"] == str(2**53 + 1)
    assert values["sandbox_runs_started_total"] == "1234567"
    assert values["sandbox_start_time_seconds"] == "1750000000.25"
    assert (values["sandbox_sessions"], values["sandbox_draining"]) == ("3", "0")


def test_the_printed_endpoint_has_an_address_that_others_can_use():
    assert _main._reachable("127.0.0.1") == "127.0.0.1"
    assert _main._reachable("0.0.0.0") != "::"
    server = ServerProcess("--backend", "userns", bind="0.0.0.0:0")
    try:
        if _main._reachable("0.0.0.0") == "0.0.0.0":
            pytest.skip("this machine has no route, so no address of its own")
        assert not server.endpoint.startswith("http://0.0.0.0")
        assert server.request("GET", "/v1/sessions")[0] == 200
        assert json.loads(server.request("GET", "/v1/health")[1])["status"] == "ok"
    finally:
        server.stop()
