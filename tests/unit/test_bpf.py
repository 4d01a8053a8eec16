from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.bpf_machine import execute, seccomp_data, unpack

from union.sandbox._seccomp.bpf import (
    ALLOW,
    EPERM,
    JEQ,
    JGE,
    JSET,
    LOW,
    Branch,
    Load,
    Return,
    assemble,
)

WORDS = st.integers(0, 2**32 - 1)
NODES = st.recursive(
    st.builds(Return, WORDS),
    lambda inner: st.one_of(
        st.builds(
            Load, st.sampled_from((0, 4, *LOW)), inner, mask=st.none() | st.just(0xFF) | WORDS
        ),
        st.builds(Branch, st.sampled_from((JEQ, JGE, JSET)), st.integers(0, 3), inner, inner),
    ),
    max_leaves=60,
)


def walk(node, data):
    """The meaning of a tree, without any layout."""
    accumulator = 0
    while not isinstance(node, Return):
        if isinstance(node, Load):
            accumulator = int.from_bytes(data[node.offset : node.offset + 4], "little")
            accumulator &= 0xFFFFFFFF if node.mask is None else node.mask
            node = node.then
        else:
            held = {
                JEQ: accumulator == node.k,
                JGE: accumulator >= node.k,
                JSET: bool(accumulator & node.k),
            }[node.op]
            node = node.then if held else node.other
    return node.verdict


@given(NODES, st.integers(0, 4), st.lists(st.integers(0, 4), min_size=6, max_size=6))
def test_layout_means_what_the_tree_means(node, nr, args):
    data = seccomp_data(nr, arch=1, args=tuple(args))
    assert execute(unpack(assemble(node)), data)[0] == walk(node, data)


@pytest.mark.parametrize("count", [1, 100, 126, 127, 128, 252, 253, 254, 255, 256, 257, 300])
@pytest.mark.parametrize("shared", [False, True])
def test_a_target_beyond_the_reach_of_a_branch_is_reached(count, shared):
    node = ALLOW
    for number in range(count):
        mine = EPERM if shared else Return(number)
        node = Branch(JEQ, number, mine, node)
    code = unpack(assemble(Load(0, node)))
    for number in (0, 1, count // 2, count - 1, count):
        data = seccomp_data(number, arch=1)
        assert execute(code, data)[0] == walk(Load(0, node), data)


def test_equal_subtrees_are_laid_out_once():
    check = Load(LOW[1], Branch(JSET, 7, EPERM, ALLOW))
    once = len(assemble(Load(0, Branch(JEQ, 1, check, EPERM))))
    twice = len(assemble(Load(0, Branch(JEQ, 1, check, Branch(JEQ, 2, check, EPERM)))))
    assert twice == once + 8


def balanced(low, high):
    if high - low == 1:
        return Return(low)
    middle = (low + high) // 2
    return Branch(JGE, middle, balanced(middle, high), balanced(low, middle))


def test_a_program_that_the_kernel_would_not_accept_is_refused():
    with pytest.raises(ValueError, match="the kernel accepts 4096"):
        assemble(balanced(0, 2100))


@pytest.mark.parametrize("leaves", [*range(120, 136), *range(250, 262), 511, 512, 513])
def test_a_search_around_the_reach_of_a_branch_finds_every_leaf(leaves):
    code = unpack(assemble(Load(0, balanced(0, leaves))))
    found = [execute(code, seccomp_data(number, arch=1))[0] for number in range(leaves)]
    assert found == list(range(leaves))


@given(st.integers(0, 1999))
def test_a_large_search_finds_every_leaf(number):
    code = unpack(LARGE)
    assert execute(code, seccomp_data(number, arch=1))[0] == number


LARGE = assemble(Load(0, balanced(0, 2000)))
