"""The secret from which owners derive their tokens."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from union.sandbox.cluster._announce import new_signing_key
from union.sandbox.cluster._attach_key import VARIABLE, attach_key, key_file
from union.sandbox.cluster._keys import Keys
from union.sandbox.errors import SandboxUsageError

pytestmark = pytest.mark.spec("P7")


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path / "state"


def test_the_file_is_made_once_and_for_its_user_only(own_state):
    assert attach_key(create=False) is None
    assert not own_state.exists()
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: attach_key(create=True), range(32)))
    assert len(keys) == 1
    assert keys == {attach_key(create=False)}
    assert len(keys.pop() or "") >= 32
    assert stat.S_IMODE(os.stat(key_file()).st_mode) == 0o600
    assert os.listdir(os.path.dirname(key_file())) == ["attach-key"]


def test_a_file_that_others_can_change_is_refused():
    attach_key(create=True)
    os.chmod(key_file(), 0o666)
    with pytest.raises(SandboxUsageError, match="other users can change it"):
        attach_key(create=False)
    # A session does not depend on it: its keys are random then.
    assert attach_key(create=True) is None
    assert Keys.for_run("a", "b") != Keys.for_run("a", "b")


def test_a_home_that_cannot_be_written_costs_only_the_attaching(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    assert attach_key(create=True) is None
    assert attach_key(create=False) is None


def test_the_keys_of_a_run_follow_from_the_secret_its_name_and_its_salt():
    made = Keys.for_run("run", "salt")
    assert made == Keys.derived(attach_key(create=False) or "", "run", "salt")
    others = [
        Keys.for_run("run", "other"),
        Keys.for_run("runs", "alt"),
        Keys.derived("k", "run", "salt"),
    ]
    tokens = [token for keys in (made, *others) for token in (keys.owner, keys.guest)]
    assert len(set(tokens)) == 8
    assert all(len(token) == 43 for token in tokens)
    assert "owner" not in repr(made)
    assert new_signing_key(made.announcement) == new_signing_key(made.announcement)
    assert new_signing_key(made.announcement) != new_signing_key(others[0].announcement)
    assert new_signing_key() != new_signing_key()
