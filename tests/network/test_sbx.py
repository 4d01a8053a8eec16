"""``sbx run`` with network options, and its reports about refused hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.network.services import PACKAGE

from union import sandbox as sb
from union.sandbox._cli.main import main

if TYPE_CHECKING:
    from pathlib import Path

    from tests.network.conftest import Resolver
    from tests.network.services import Services


@pytest.mark.spec("H", "F6")
def test_a_package_is_installed_from_the_command_line(
    backend: str,
    served: Services,
    resolver: Resolver,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A server on loopback replaces the index, so loopback must be allowed too."""
    port = served.https.port
    run = ("run", "--backend", backend, "--work-dir", str(tmp_path))
    install = ("uv", "pip", "install", "--no-cache", PACKAGE)
    index = ("--env", f"UV_DEFAULT_INDEX=https://{sb.PYPI_HOSTS[0]}:{port}/simple")
    stand_in = ("--allow", f"127.0.0.1:{port}")

    retries = ("--env", "UV_HTTP_RETRIES=0")
    assert main([*run, *index, *retries, *stand_in, "--", *install]) != 0
    refused = capfd.readouterr().err
    assert f"sbx: denied {sb.PYPI_HOSTS[0]}" in refused
    assert f"--allow {sb.PYPI_HOSTS[0]}" in refused

    code = main([*run, *index, "--allow-pypi", *stand_in, "--", *install])
    assert code == 0, capfd.readouterr().err
    capfd.readouterr()
    assert main([*run, "--python", f"import {PACKAGE}; print({PACKAGE}.answer)"]) == 0
    assert capfd.readouterr().out == "42\n"
