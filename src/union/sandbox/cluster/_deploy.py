"""``unionai-sandbox-deploy``: deploys the default environments, once per cluster.

It runs ``flyte deploy --all`` on a module that names them, passes unknown arguments on, and returns
Flyte's exit code. ``--dry-run`` first prints what is deployed, which needs no cluster.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Final

from union.sandbox._core.optional_deps import MissingExtraError, require
from union.sandbox.errors import SandboxError

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
    add(
        "--dry-run",
        action="store_true",
        help="print what would be deployed, and deploy nothing; works without a cluster",
    )
    add("-c", "--config", metavar="FILE", help="Flyte's configuration file")
    add("--endpoint", metavar="URL", help="the control plane")
    add("--insecure", action="store_true", help="it is reached without TLS")
    add("--org", metavar="NAME", help="the organisation")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console script; return 2 for a usage error, otherwise Flyte's exit code."""
    options, passed_on = _parser().parse_known_args(argv)
    try:
        require("flyte", extra="deploy", what="unionai-sandbox-deploy")
        require("kubernetes", extra="deploy", what="unionai-sandbox-deploy")
    except MissingExtraError as exc:
        return _fail(str(exc))
    if options.config is not None and not os.path.isfile(options.config):
        return _fail(f"--config {options.config}: there is no such file")
    problem = "" if options.endpoint is not None else _why_not_configured(options.config)
    if options.dry_run:
        try:
            _print_plan()
        except SandboxError as exc:
            return _fail(str(exc))
        if problem:
            sys.stdout.write("no cluster is configured, so nothing is compared with one\n")
            return 0
    if problem:
        return _fail(problem)
    flyte = [sys.executable, "-c", "from flyte.cli.main import main; main()"]
    for option, value in (
        ("--config", options.config),
        ("--endpoint", options.endpoint),
        ("--org", options.org),
    ):
        flyte += [option, value] if value is not None else []
    flyte += ["--insecure"] if options.insecure else []
    with tempfile.TemporaryDirectory(prefix="unionai-sandbox-deploy-") as place:
        module = os.path.join(place, "default_sandboxes.py")
        with open(module, "w", encoding="utf-8") as file:
            file.write(_MODULE)
        deploy = ["deploy", *(["--dry-run"] if options.dry_run else []), "--root-dir", place]
        # The arguments come from the user of this command.
        done = subprocess.run(  # noqa: S603
            [*flyte, *deploy, *passed_on, "--all", module], check=False
        )
    return done.returncode


def _print_plan() -> None:
    from union.sandbox import DEFAULT_SANDBOX_ENV, DEFAULT_SANDBOX_ENV_BWRAP
    from union.sandbox.cluster._deploy_plan import describe_deployment

    sys.stdout.write(describe_deployment([DEFAULT_SANDBOX_ENV, DEFAULT_SANDBOX_ENV_BWRAP]))
    sys.stdout.flush()  # Before Flyte's own output.


def _why_not_configured(config: str | None) -> str:
    """Return why there is no cluster to deploy to; empty if there is one."""
    import flyte.config

    if os.environ.get("FLYTE_API_KEY"):
        return ""
    if flyte.config.auto(config).platform.endpoint:
        return ""
    return (
        "Flyte is not configured for a cluster\n"
        "hint: flyte create config --endpoint HOST --project P --domain D; "
        "or pass --config FILE, or --endpoint URL"
    )


def _fail(message: str) -> int:
    sys.stderr.write(f"unionai-sandbox-deploy: {message}\n")
    return _USAGE
