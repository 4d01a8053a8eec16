"""Token, digest and key files: owner, mode and path."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from union.sandbox.errors import SandboxUsageError
from union.sandbox.server import _secret_files
from union.sandbox.server._config import config_from_arguments
from union.sandbox.server._tls import server_context

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = "a-token-0123456789abcdef"
OPTIONS = {"--token-file": TOKEN, "--token-sha256-file": hashlib.sha256(TOKEN.encode()).hexdigest()}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a directory that every user can traverse."""
    for directory in (tmp_path, *tmp_path.parents):
        mode = stat.S_IMODE(directory.stat().st_mode)
        if directory.stat().st_uid == os.geteuid() and not mode & stat.S_IXOTH:
            directory.chmod(mode | stat.S_IXOTH)
    return tmp_path


def accepted(option: str, path: Path) -> bool:
    """Return whether a server starts with this file; if not, check that the error has a hint."""
    try:
        config = config_from_arguments([option, str(path)], {})
    except SandboxUsageError as exc:
        refused = exc
    else:
        assert config.verifier is not None
        return config.verifier.accepts(TOKEN)
    assert option in str(refused)
    assert refused.hint
    return False


@pytest.mark.threat(167)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440, 0o644, 0o660, 0o666, 0o602, 0o620])
def test_the_mode_of_a_secret_file(place: Path, option: str, mode: int):
    file = place / "secret"
    file.write_text(OPTIONS[option])
    file.chmod(mode)
    is_written_by_others = mode & 0o022
    is_read_by_all = mode & 0o004 and option == "--token-file"
    assert accepted(option, file) is not bool(is_written_by_others or is_read_by_all)


@pytest.mark.threat(167)
def test_a_file_that_others_cannot_reach_may_be_readable(place: Path):
    private = place / "private"
    private.mkdir(mode=0o700)
    file = private / "secret"
    file.write_text(TOKEN)
    file.chmod(0o644)
    assert accepted("--token-file", file)
    private.chmod(0o755)
    assert not accepted("--token-file", file)


@pytest.mark.threat(167)
@pytest.mark.parametrize("mode", [0o755, 0o777, 0o775, 0o1777])
def test_a_directory_that_others_can_write_is_refused(place: Path, mode: int):
    below = place / "shared" / "below"
    below.mkdir(parents=True)
    file = below / "secret"
    file.write_text(TOKEN)
    file.chmod(0o600)
    (place / "shared").chmod(mode)
    assert accepted("--token-file", file) is (mode in {0o755, 0o1777})


@pytest.mark.threat(167)
def test_the_target_of_a_link_is_checked(place: Path):
    shared = place / "shared"
    shared.mkdir()
    (shared / "secret").write_text(TOKEN)
    (shared / "secret").chmod(0o600)
    link = place / "link"
    link.symlink_to("shared/../shared/secret")
    assert accepted("--token-file", link)
    shared.chmod(0o777)
    assert not accepted("--token-file", link)
    (place / "loop").symlink_to("loop")
    assert not _starts("--token-file", place / "loop")


def _starts(option: str, path: Path) -> bool:
    try:
        config_from_arguments([option, str(path)], {})
    except SandboxUsageError:
        return False
    return True


@pytest.mark.threat(167)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_the_owner_must_be_root_or_the_user_of_the_server(place: Path):
    file = place / "secret"
    file.write_text(TOKEN)
    file.chmod(0o600)
    assert accepted("--token-file", file), "the control"
    os.chown(file, 61234, 61234)
    assert not accepted("--token-file", file)
    os.chown(file, 0, 0)
    link = place / "link"
    link.symlink_to("secret")
    assert accepted("--token-file", link), "the control"
    os.lchown(link, 61234, 61234)
    assert not _starts("--token-file", link)


def test_other_file_types_are_refused(place: Path):
    for path in (place, place / "missing", "/dev/zero"):
        with pytest.raises(SandboxUsageError):
            _secret_files.read_secret("--token-file", str(path), is_secret=True)
    large = place / "large"
    large.write_bytes(b"x" * 5000)
    large.chmod(0o600)
    with pytest.raises(SandboxUsageError, match="more than 4096"):
        _secret_files.read_secret("--token-file", str(large), is_secret=True)


def test_a_pipe_of_the_shell_is_accepted():
    code = (
        "import sys; from union.sandbox.server._config import config_from_arguments as c;"
        "print(c(sys.argv[1:], {}).verifier.accepts('" + TOKEN + "'))"
    )
    command = f"exec '{sys.executable}' -c \"$1\" --token-file <(printf %s '{TOKEN}')"
    done = subprocess.run(
        ["bash", "-c", command, "bash", code], capture_output=True, text=True, check=False
    )
    assert done.stdout == "True\n", done.stderr


@pytest.mark.threat(157)
@pytest.mark.parametrize("end, fine", [("", 1), ("\n", 1), ("\r\n", 1), ("\n\n", 0), (" \n", 0)])
def test_one_line_end_is_not_part_of_the_token(place: Path, end: str, fine: int):
    """LF and CRLF; more white space cannot be sent in a header."""
    file = place / "secret"
    file.write_bytes((TOKEN + end).encode())
    file.chmod(0o600)
    assert accepted("--token-file", file) is bool(fine)


@pytest.mark.threat(157)
@pytest.mark.parametrize("text", ["{}\r{}", "{}\n{}", " {}", "{}\0"])
def test_a_token_that_no_header_can_carry_is_refused(place: Path, text: str):
    file = place / "secret"
    file.write_text(text.format(TOKEN, TOKEN))
    file.chmod(0o600)
    with pytest.raises(SandboxUsageError) as caught:
        config_from_arguments(["--token-file", str(file)], {})
    assert TOKEN not in str(caught.value)


@pytest.mark.threat(167)
def test_the_private_key_of_tls_is_checked(place: Path):
    from union.sandbox.server._tls import _self_signed

    certificate, key = _self_signed()
    (place / "cert.pem").write_text(certificate)
    (place / "key.pem").write_text(key)
    argv = ["--tls-cert", str(place / "cert.pem"), "--tls-key", str(place / "key.pem")]
    config = config_from_arguments(argv, {})
    (place / "cert.pem").chmod(0o644)
    (place / "key.pem").chmod(0o600)
    assert server_context(config)[0] is not None, "the control"
    for file, mode in (("key.pem", 0o644), ("key.pem", 0o660), ("cert.pem", 0o666)):
        (place / file).chmod(mode)
        with pytest.raises(SandboxUsageError, match=file):
            server_context(config)
        (place / file).chmod(0o600)
