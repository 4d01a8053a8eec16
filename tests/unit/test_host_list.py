"""Host lists such as ``PYPI_HOSTS`` concatenate with lists and tuples and are immutable."""

from __future__ import annotations

import copy
import pickle

import pytest

from union import sandbox as sb
from union.sandbox._policy.entries import parse_entries
from union.sandbox.constants import HostList

pytestmark = pytest.mark.spec("F6")


@pytest.mark.parametrize("own", [["a.example"], ("a.example",), HostList(["a.example"])])
def test_host_lists_concatenate_from_both_sides(own):
    before, after = own + sb.PYPI_HOSTS, sb.PYPI_HOSTS + own
    assert list(before) == ["a.example", *sb.PYPI_HOSTS]
    assert list(after) == [*sb.PYPI_HOSTS, "a.example"]
    for added in (before, after):
        assert isinstance(added, HostList)
        assert len(parse_entries(added, argument="network_allowlist")) == 4
        assert isinstance(added + ["b.example"], HostList)  # noqa: RUF005 - what is tested


def test_concatenation_does_not_change_the_operands():
    hosts = ["a.example"]
    hosts += sb.PYPI_HOSTS
    assert len(hosts) == 4
    mine = sb.PYPI_HOSTS
    mine += ["a.example"]
    assert (len(mine), len(sb.PYPI_HOSTS)) == (4, 3)
    assert (*sb.PYPI_HOSTS, *sb.CLOUD_METADATA_DENY) == sb.PYPI_HOSTS + sb.CLOUD_METADATA_DENY


def test_a_host_list_behaves_like_a_tuple():
    assert tuple(sb.PYPI_HOSTS) == sb.PYPI_HOSTS
    assert hash(sb.PYPI_HOSTS) == hash(tuple(sb.PYPI_HOSTS))
    for same in (copy.deepcopy(sb.PYPI_HOSTS), pickle.loads(pickle.dumps(sb.PYPI_HOSTS))):
        assert same == sb.PYPI_HOSTS
    with pytest.raises(TypeError):
        sb.PYPI_HOSTS[0] = "a.example"
    for wrong in ("a.example", 1, None):
        with pytest.raises(TypeError):
            sb.PYPI_HOSTS + wrong
        with pytest.raises(TypeError):
            wrong + sb.PYPI_HOSTS
