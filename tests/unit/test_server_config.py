"""The command line of a server: defaults, accepted and refused values."""

from __future__ import annotations

import hashlib

import pytest

from union.sandbox.errors import SandboxUsageError
from union.sandbox.server._config import Bind, config_from_arguments
from union.sandbox.server._network_policy import own_address_entries

TOKEN = "0123456789abcdef0123"


def config(*argv: str, **environ: str):
    return config_from_arguments(argv, environ)


def test_defaults():
    found = config()
    assert found.binds == (Bind(host="127.0.0.1", port=8080),)
    assert found.verifier is None
    assert found.backends == ("userns",)
    assert found.work_dir == "/tmp/sandbox-work"
    assert found.ceiling.mode == "open"


@pytest.mark.spec("I1")
@pytest.mark.parametrize("bind", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.com:1"])
def test_a_reachable_address_requires_a_token(bind):
    with pytest.raises(SandboxUsageError, match="requires a token") as caught:
        config("--bind", bind)
    assert "--token-file" in caught.value.hint
    assert config("--bind", bind, SANDBOX_SERVER_TOKEN=TOKEN).verifier is not None


@pytest.mark.spec("I1")
@pytest.mark.parametrize("bind", ["127.0.0.1:0", "[::1]:0", "localhost:9", "unix:/run/s"])
def test_a_local_address_requires_no_token(bind):
    assert config("--bind", bind).binds[0].is_local


@pytest.mark.parametrize("bind", ["", "80", ":80", "h:", "h:x", "h:70000", "unix:relative"])
def test_an_invalid_bind_is_refused(bind):
    with pytest.raises(SandboxUsageError) as caught:
        config("--bind", bind)
    assert caught.value.argument == "--bind"


@pytest.mark.spec("I1")
def test_the_token_has_one_source(tmp_path):
    file, digest = tmp_path / "token", tmp_path / "digest"
    file.write_text(TOKEN + "\n")
    digest.write_text(hashlib.sha256(TOKEN.encode()).hexdigest() + "\n")
    for found in (
        config("--token-file", str(file)),
        config("--token-sha256-file", str(digest)),
        config(SANDBOX_SERVER_TOKEN=TOKEN),
        config(SANDBOX_SERVER_TOKEN_SHA256=digest.read_text()),
    ):
        assert found.verifier is not None
        assert found.verifier.accepts(TOKEN)
    with pytest.raises(SandboxUsageError, match="both"):
        config("--token-file", str(file), SANDBOX_SERVER_TOKEN=TOKEN)


@pytest.mark.parametrize("text", ["", "short", "x" * 15, "ž" * 20, "a b\tc" * 9])
def test_an_invalid_token_is_refused_and_not_repeated(tmp_path, text):
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(SandboxUsageError) as caught:
        config("--token-file", str(file))
    assert not text or text not in str(caught.value)


def test_a_token_file_that_others_can_write_is_refused(tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o666)
    with pytest.raises(SandboxUsageError, match="other users can change it"):
        config("--token-file", str(file))
    with pytest.raises(SandboxUsageError, match="No such file"):
        config("--token-file", str(tmp_path / "none"))


@pytest.mark.parametrize(
    "argv",
    [
        ("--tls-cert", "x"), ("--tls-key", "x"), ("--max-sessions", "0"), ("--grace", "0"),
        ("--tls-self-signed", "--tls-cert", "x", "--tls-key", "y"), ("--work-dir", "relative"),
        ("--network-allow", "a.example"), ("--network-mode", "allowlist"),
        ("--network-mode", "allowlist", "--network-allow", "*"), ("--allow-path", "x"),
    ],
)  # fmt: skip
def test_invalid_or_contradicting_options_are_refused(argv):
    with pytest.raises(SandboxUsageError):
        config(*argv)


@pytest.mark.spec("I1")
def test_there_is_no_option_for_the_token_itself(capsys):
    with pytest.raises(SystemExit):
        config("--token", TOKEN)
    assert "unrecognized arguments" in capsys.readouterr().err


def test_own_addresses():
    loopback = {entry.text for entry in own_address_entries([("127.0.0.1", 81)])}
    assert loopback == {"0.0.0.0:81", "[::]:81", "127.0.0.0/8:81", "[::1]:81"}
    one = {entry.text for entry in own_address_entries([("192.0.2.7", 5)])}
    assert one == {"0.0.0.0:5", "[::]:5", "192.0.2.7:5"}
    everywhere = {entry.text for entry in own_address_entries([("0.0.0.0", 5)])}
    assert {"127.0.0.0/8:5", "[::1]:5", "0.0.0.0:5"} <= everywhere
    assert own_address_entries([]) == ()
