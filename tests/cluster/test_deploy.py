"""unionai-sandbox-deploy without a cluster: a dry run, and its errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from union.sandbox.cluster._wheel import current_wheel

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "import sys; from union.sandbox.cluster._deploy import main; sys.exit(main())"
# No process listens on the discard port of this machine.
DEAD = "http://127.0.0.1:9"


def deploy(*argv: str, home: Path, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *argv],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
        cwd=home,
        env={**os.environ, "COLUMNS": "200"},
    )


@pytest.mark.spec("I7", "A4")
def test_a_dry_run_finds_both_defaults_without_a_cluster(own_home):
    done = deploy(
        "--dry-run", "--endpoint", DEAD, "--insecure", "-p", "p", "-d", "d", home=own_home
    )
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    assert "union-sandbox.sandbox_server" in shown.replace("\n", "") or "union-sandbox" in shown
    assert "union-sandbox-bwrap" in shown


@pytest.mark.spec("A4", "I7", "P5")
def test_a_dry_run_without_a_configuration_prints_the_deployment(own_home):
    done = deploy("--dry-run", home=own_home)
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    for name in ("union-sandbox", "union-sandbox-bwrap"):
        assert f"environment {name}\n" in shown
        assert f"{name}.sandbox_server" in shown
    assert "capabilities    SYS_ADMIN" in shown
    wheel = current_wheel()
    assert f"wheel           unionai-sandbox=={wheel.version}" in shown
    assert f"wheel {wheel.path.name}\n" in shown
    assert f"made from       editable: {ROOT / 'src'}" in shown
    assert f"sha256          {wheel.sha256}" in shown
    assert f"files           {len(wheel.names)}" in shown
    assert "union/sandbox/_linux/bin/  2" in shown
    assert "no cluster is configured" in shown
    done = deploy("--dry-run", "--config", "/no/such", home=own_home)
    assert (done.returncode, "no such file" in done.stderr) == (2, True)


@pytest.mark.spec("I7")
def test_without_a_configuration_the_error_explains_how_to_create_one(own_home):
    done = deploy(home=own_home)
    assert done.returncode == 2
    assert "not configured" in done.stderr
    assert "flyte create config" in done.stderr
    done = deploy("--config", "/no/such", home=own_home)
    assert (done.returncode, "no such file" in done.stderr) == (2, True)


@pytest.mark.spec("I7", "A2")
def test_without_flyte_the_error_names_the_extra(own_home):
    program = (
        f"import sys; sys.modules['flyte'] = None; sys.modules['kubernetes'] = None\n{PROGRAM}"
    )
    done = deploy(home=own_home, program=program)
    assert done.returncode == 2
    assert "pip install '.[deploy]'" in done.stderr


@pytest.mark.spec("I7")
def test_unknown_options_go_to_flyte_and_its_exit_code_is_returned(own_home):
    done = deploy("--endpoint", DEAD, "--insecure", "--no-such-option", home=own_home)
    assert done.returncode not in {0, 2} or "no-such-option" in done.stdout + done.stderr
    assert "no-such-option" in done.stdout + done.stderr


@pytest.mark.spec("I7")
def test_a_custom_environment_is_deployed_as_documented(own_home):
    (own_home / "my_sandboxes.py").write_text(
        "import flyte\nfrom union import sandbox as sb\n"
        "ml_sandbox = sb.SandboxEnvironment(name='ml-sandbox', "
        "image=sb.base_sandbox_image.with_pip_packages('torch'), "
        "resources=flyte.Resources(cpu='8', memory='32Gi', gpu='L4:1'), "
        "secrets=[flyte.Secret(group='hf', key='HF_TOKEN')], env_vars={'HF_HOME': '/tmp/hf'}, "
        "sandbox_mode='bwrap', runtime='container', description='ML')\n"
    )
    (own_home / "deploy_my_sandboxes.py").write_text(
        "from my_sandboxes import ml_sandbox\nml_sandbox_env = ml_sandbox.task_env\n"
    )
    flyte = "from flyte.cli.main import main; main()"
    done = deploy(
        "--endpoint", DEAD, "--insecure", "deploy", "--dry-run", "-p", "p", "-d", "d",
        "deploy_my_sandboxes.py", "ml_sandbox_env",
        home=own_home, program=f"import sys; sys.path.insert(0, '')\n{flyte}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ml-sandbox" in done.stdout + done.stderr


def test_the_script_is_installed():
    from importlib import metadata

    scripts = {point.name: point.value for point in metadata.entry_points(group="console_scripts")}
    assert scripts["unionai-sandbox-deploy"] == "union.sandbox.cluster._deploy:main"
