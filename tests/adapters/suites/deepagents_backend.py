"""LangChain's standard tests for sandboxes, below /tmp and below the work dir; and our own."""

import os

import pytest
from langchain_tests.integration_tests import SandboxIntegrationTests

from union.sandbox import sync
from union.sandbox.adapters.deepagents import UnionSandbox

BACKEND = os.environ.get("ADAPTER_BACKEND", "userns")


class TestInTmp(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self):
        with UnionSandbox(backend=BACKEND) as box:
            yield box


class TestInWorkDir(TestInTmp):
    @pytest.fixture(autouse=True)
    def sandbox_test_root(self, request, sandbox):
        return f"{sandbox.work_dir}/t/{request.node.name}"


@pytest.fixture(scope="module")
def box():
    with UnionSandbox(backend=BACKEND) as made:
        yield made


def test_output_is_in_order(box):
    out = box.execute("for i in 1 2 3; do echo o$i; echo e$i >&2; done").output.split()
    assert out == ["o1", "e1", "o2", "e2", "o3", "e3"]


def test_a_timeout_is_124_and_keeps_output(box):
    response = box.execute("echo begun; sleep 60", timeout=1)
    assert response.exit_code == 124
    assert "begun" in response.output


def test_large_edits_go_by_files_in_tmp(box):
    path, old, new = f"{box.work_dir}/large.txt", "a" * 100_000, "b" * 100_000
    box.write(path, f"x{old}y")
    assert box.edit(path, old, new).error is None
    assert box.download_files([path])[0].content == f"x{new}y".encode()


def test_a_server_left_behind_is_there_for_the_next_command(box):
    box.execute("nohup sh -c 'while :; do date +%s > beat; sleep 0.2; done' >/dev/null 2>&1 &")
    first = box.execute("until test -s beat; do sleep 0.1; done; cat beat", timeout=30).output
    changed = f'until test "0$(cat beat)" -gt {int(first)}; do sleep 0.1; done; echo more'
    assert box.execute(changed, timeout=30).output == "more\n"


def test_the_host_is_out_of_reach(box, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    found = box.download_files([str(secret), "/etc/shadow", "relative"])
    assert [response.content for response in found] == [None, None, None]
    assert found[2].error == "invalid_path"
    assert box.upload_files([("/etc/motd", b"x")])[0].error == "permission_denied"


def test_a_session_of_the_caller_is_used_and_stays_open():
    with sync.on_device.session(backend=BACKEND) as session:
        with UnionSandbox(session=session) as box:
            assert box.execute("echo $((40 + 2))").output == "42\n"
            assert box.id == session.id
        assert session.exec("true").ok


async def test_inside_a_running_loop(box):
    assert box.execute("echo sync").output == "sync\n"
    assert (await box.aexecute("echo async")).output == "async\n"
