"""``session()`` accepts the arguments of ``on_device.session()``, under the same rules."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING

import pytest

from union import sandbox as sb

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.spec("I4", "I8"), pytest.mark.timeout(60)]


@pytest.mark.spec("B3", "C5", "E4")
@pytest.mark.parametrize("backend", ["userns", "bubblewrap"])
async def test_all_arguments_together(backend: str, tmp_path: Path):
    work, shown, shared = (tmp_path / name for name in ("work", "shown", "shared"))
    for path in (work, shown, shared):
        path.mkdir()
    (shown / "f").write_text("read me\n")
    async with sb.session(
        local=True,
        backend=backend,
        timeout_s=60,
        env={"OF_THE_SESSION": "seen"},
        host_work_dir=str(work),
        read_only_paths=[str(shown)],
        read_write_paths=[str(shared)],
    ) as sbx:
        assert sbx.work_dir == str(work), "also before the first call"
        assert copy.copy(sbx).work_dir == str(work)
        done = await sbx.exec(
            f"pwd; echo $OF_THE_SESSION; cat {shown}/f; touch here {shared}/there; "
            f"touch {shown}/no 2>/dev/null || echo read-only"
        )
        assert done.stdout == f"{work}\nseen\nread me\nread-only\n"
        assert sbx.backend == backend
        assert (await copy.copy(sbx).exec("echo $OF_THE_SESSION")).stdout == "seen\n"
    assert (work / "here").exists(), "a pinned work dir stays"
    assert (shared / "there").exists()
    assert not (shown / "no").exists()


async def test_a_path_that_is_missing_is_an_error_that_names_it(tmp_path: Path):
    for argument in ("read_only_paths", "read_write_paths"):
        missing = os.path.join(tmp_path, "missing")
        with pytest.raises(sb.SandboxError, match="missing"):
            async with sb.session(local=True, **{argument: [missing]}):
                pytest.fail("it was opened")
    with pytest.raises(sb.SandboxError, match="gone"):
        async with sb.session(local=True, host_work_dir=os.path.join(tmp_path, "gone")):
            pytest.fail("it was opened")


async def test_an_upstream_proxy_is_passed_to_open_commands():
    proxy = "http://proxy.example:3128"
    async with sb.session(local=True, network_mode="open", network_proxy_url=proxy) as sbx:
        assert (await sbx.exec("echo $HTTPS_PROXY")).stdout.strip() == proxy


@pytest.mark.spec("C10")
@pytest.mark.parametrize(
    "wrong, argument",
    [
        ({"backend": "docker"}, "backend"),
        ({"backend": "none"}, "backend"),
        ({"backend": ["userns"]}, "backend"),
        ({"sandbox_mode": ["userns"]}, "sandbox_mode"),
        ({"sandbox_mode": "bubblewrap"}, "sandbox_mode"),
        ({"backend": "userns", "sandbox_mode": "bwrap"}, "backend"),
        ({"timeout": 5, "timeout_s": 5}, "timeout_s"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"timeout_s": 10**6}, "timeout_s"),
        ({"env": {"A=B": "c"}}, "env"),
        ({"env": ["A"]}, "env"),
        ({"host_work_dir": "relative"}, "host_work_dir"),
        ({"read_only_paths": "/etc"}, "read_only_paths"),
        ({"read_write_paths": ["relative"]}, "read_write_paths"),
        ({"network_proxy_url": "http://p:1", "network_mode": "blocked"}, "network_proxy_url"),
        ({"network_mode": "open", "network_proxy_url": "gopher://p"}, "network_proxy_url"),
        ({"service_account": ""}, "service_account"),
    ],
    ids=str,
)
def test_an_invalid_argument_is_named_by_the_call(wrong, argument):
    with pytest.raises(sb.SandboxUsageError) as caught:
        sb.session(local=True, **wrong)
    assert caught.value.argument == argument
    with pytest.raises(TypeError):
        sb.session(time_out=3)


async def test_both_spellings_of_a_backend_are_equivalent():
    for given in ({"backend": "bwrap"}, {"backend": "bubblewrap", "sandbox_mode": "bwrap"}):
        launch = sb.session(local=True, **given)
        async with launch as sbx:
            assert sbx.sandbox_mode == "bwrap"
            assert (await sbx.exec("true")).ok


@pytest.mark.spec("E3")
async def test_the_first_call_can_copy_a_tree(tmp_path: Path):
    (tmp_path / "f").write_text("x")
    async with sb.session(local=True) as sbx:
        assert (await sbx.upload(tmp_path, "in")).files == 1
    async with sb.session(local=True) as sbx:
        assert (await sbx.download(".", tmp_path / "out")).files == 0
