from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from union.sandbox._policy.names import NameSyntaxError, normalise_name


@given(st.text(max_size=40))
def test_normalising_twice_changes_nothing_and_gives_plain_ascii(text):
    try:
        name = normalise_name(text)
    except NameSyntaxError:
        return
    assert normalise_name(name) == name
    assert name == name.lower()
    assert name.isascii()
    assert name.isprintable()
    assert not set(name) & set(" @/:%\\?#[]*\0")
    assert not name.endswith(".")
    assert len(name) <= 253


@pytest.mark.parametrize("text", ["a\u2100b.example", "a\uff0fb.example", "a\uff20b.example"])
def test_separators_from_unicode_mapping_are_refused(text):
    with pytest.raises(NameSyntaxError):
        normalise_name(text)


def test_the_length_of_a_name_is_limited():
    label = "a" * 63
    assert normalise_name(".".join([label] * 3 + ["a" * 61]))
    with pytest.raises(NameSyntaxError, match="longer"):
        normalise_name(".".join([label] * 4))
