"""``unionai-sandbox-deploy``: deploys the default environments, once per cluster.

It is ``flyte deploy --all`` on a module that names them. What it does not know of its arguments, it
passes on, and the exit code is Flyte's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Final

from union.sandbox._core.optional_deps import MissingExtraError, require

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_MODULE: Final = '''\
"""The default sandbox environments, where flyte deploy looks for them."""

from union.sandbox import DEFAULT_SANDBOX_ENV, DEFAULT_SANDBOX_ENV_BWRAP

userns = DEFAULT_SANDBOX_ENV.task_env
bwrap = DEFAULT_SANDBOX_ENV_BWRAP.task_env
'''
_USAGE: Final = 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="unionai-sandbox-deploy",
        description="Deploys the default sandbox environments (userns and bwrap) to the cluster "
        "that Flyte is configured for. Needed once per cluster and version.",
        epilog="All other options go to `flyte deploy`: --project, --domain, --version, --image "
        "and so on; see `flyte deploy --help`.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--dry-run", action="store_true", help="show what would be deployed, and deploy nothing")
    add("-c", "--config", metavar="FILE", help="Flyte's configuration file")
    add("--endpoint", metavar="URL", help="the control plane")
    add("--insecure", action="store_true", help="it is reached without TLS")
    add("--org", metavar="NAME", help="the organisation")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The console script; 2 for what must be put right first, else the exit code of Flyte."""
    told, passed_on = _parser().parse_known_args(argv)
    try:
        require("flyte", extra="deploy", what="unionai-sandbox-deploy")
        require("kubernetes", extra="deploy", what="unionai-sandbox-deploy")
    except MissingExtraError as exc:
        return _complain(str(exc))
    if told.endpoint is None and (problem := _unconfigured(told.config)):
        return _complain(problem)
    flyte = [sys.executable, "-c", "from flyte.cli.main import main; main()"]
    for option, value in (
        ("--config", told.config),
        ("--endpoint", told.endpoint),
        ("--org", told.org),
    ):
        flyte += [option, value] if value is not None else []
    flyte += ["--insecure"] if told.insecure else []
    with tempfile.TemporaryDirectory(prefix="unionai-sandbox-deploy-") as place:
        module = os.path.join(place, "default_sandboxes.py")
        with open(module, "w", encoding="utf-8") as file:
            file.write(_MODULE)
        deploy = ["deploy", *(["--dry-run"] if told.dry_run else []), "--root-dir", place]
        # The arguments are those of whoever typed the command.
        done = subprocess.run(  # noqa: S603
            [*flyte, *deploy, *passed_on, "--all", module], check=False
        )
    return done.returncode


def _unconfigured(config: str | None) -> str:
    """Why there is no cluster to deploy to; empty if there is one."""
    import flyte.config

    if config is not None and not os.path.isfile(config):
        return f"--config {config}: there is no such file"
    if os.environ.get("FLYTE_API_KEY"):
        return ""
    if flyte.config.auto(config).platform.endpoint:
        return ""
    return (
        "Flyte is not configured for a cluster\n"
        "hint: flyte create config --endpoint HOST --project P --domain D; "
        "or pass --config FILE, or --endpoint URL"
    )


def _complain(message: str) -> int:
    sys.stderr.write(f"unionai-sandbox-deploy: {message}\n")
    return _USAGE
