"""``sbx run --secret``, and what it prints about the network."""

from __future__ import annotations

import pytest

from union import sandbox as sb
from union.sandbox._cli.main import main
from union.sandbox._cli.options import session_arguments
from union.sandbox._cli.parser import make_parser

VALUE = "sk-proj-Tr0ub4dor3staple0123456789"


def arguments(*options):
    return session_arguments(make_parser().parse_args(["run", *options, "--", "true"]))


@pytest.mark.spec("M1")
@pytest.mark.parametrize(
    "setting, expected",
    [
        ("", sb.Bearer),
        (",header=x-api-key", sb.Header),
        (",basic=user", sb.Basic),
        (",query=key", sb.Query),
    ],
)
def test_a_secret_comes_from_the_environment(monkeypatch, setting, expected):
    monkeypatch.setenv("KEY", VALUE)
    given = arguments("--secret", f"KEY@api.test{setting},allow=GET /v1/**", "--allow", "b.test")
    assert given["network_mode"] == "allowlist"
    name, http = given["network_allowlist"]
    assert name == "b.test"
    assert isinstance(http.auth, expected)
    assert http.auth.secret.reveal() == VALUE
    assert (http.host, http.env, http.allow) == ("api.test", "KEY", ("GET /v1/**",))
    assert VALUE not in repr(given)


@pytest.mark.parametrize(
    "value", ["KEY", "@api.test", "KEY@", "KEY@api.test,color=red", "UNSET@api.test"]
)
def test_an_invalid_secret_is_refused(monkeypatch, value):
    monkeypatch.setenv("KEY", VALUE)
    monkeypatch.delenv("UNSET", raising=False)
    with pytest.raises(sb.SandboxUsageError) as caught:
        arguments("--secret", value)
    assert VALUE not in str(caught.value)


def test_a_blocked_network_is_explained(capfd):
    code = "import urllib.request; urllib.request.urlopen('http://example.com')"
    assert main(["run", "--backend", "userns", "--", "python3", "-c", code]) == 1
    assert "sbx: the network is blocked" in capfd.readouterr().err
    assert main(["run", "--backend", "userns", "--shell", "exit 3"]) == 3
    assert "sbx:" not in capfd.readouterr().err
