"""Which tests `make test` and `make check` leave out: tiers.toml lists them, with the reasons.

Each collected test that the list names gets a mark, and the runs deselect by the mark. A plain
``pytest`` runs everything. The functions here also find entries that name no test, and rows of the
specification or of the attack catalogue that no test of `make test` proves.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

TABLE = Path(__file__).with_suffix(".toml")
REPEATED = "repeated"
"""The mark of the tests that only `make test-all` runs."""
HEAVY = "heavy"
"""The mark of the tests that `make check` leaves out."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Tests that are left out, and why."""

    reason: str
    tests: tuple[str, ...]
    """Directories, files or functions below tests, such as ``x/test_y.py::test_z``. Brackets choose
    among repetitions by the complete id, or by all named values of parameters: ``x[sync, userns]``.
    """
    but: tuple[str, ...] = ()
    """Tests among them that are kept."""
    cases: int = 0
    """How many cases of each function are kept, of those that earlier entries do not leave out."""


def entries(tier: str) -> tuple[Entry, ...]:
    """Return the entries of the list for ``only-in-test-all`` or ``not-in-check``."""
    found = tomllib.loads(TABLE.read_text(encoding="utf-8"))[tier]
    return tuple(
        Entry(
            entry.pop("reason"),
            tuple(entry.pop("tests")),
            tuple(entry.pop("but", ())),
            **entry,
        )
        for entry in found
    )


ONLY_IN_TEST_ALL = entries("only-in-test-all")
NOT_IN_CHECK = entries("not-in-check")


@dataclass(frozen=True, slots=True)
class Collected:
    """A collected test: its name below tests, its values of parameters, and the rows it proves."""

    name: str
    values: frozenset[str] = frozenset()
    rows: frozenset[str] = frozenset()

    @classmethod
    def of(cls, item: pytest.Item) -> Self:
        """Return what is needed of a test of pytest."""
        call = getattr(item, "callspec", None)
        values: set[Any] = set() if call is None else {call.id, *_texts(call.params.values())}
        rows = {
            f"{kind} {row}"
            for kind in ("spec", "threat")
            for mark in item.iter_markers(kind)
            for row in mark.args
        }
        return cls(item.nodeid.removeprefix("tests/"), frozenset(values), frozenset(rows))

    @property
    def function(self) -> str:
        """The name without the brackets."""
        return self.name.partition("[")[0]

    @property
    def file(self) -> str:
        """The path of its file below tests."""
        return self.name.partition("::")[0]

    def places(self) -> Iterator[str]:
        """Yield what contains it: directories, file and function."""
        parts = self.file.split("/")
        yield from ("/".join(parts[:end]) for end in range(1, len(parts) + 1))
        yield self.function

    def has(self, values: str) -> bool:
        """Return whether it is among the repetitions that the text in brackets chooses."""
        return not values or values in self.values or self.values.issuperset(values.split(", "))


def _texts(values: Iterable[object]) -> set[str]:
    return {value for value in values if isinstance(value, str)}


def _split(name: str) -> tuple[str, str]:
    """Return what is before the brackets, and what is in them."""
    place, _, values = name.partition("[")
    return place, values.removesuffix("]")


@dataclass(frozen=True, slots=True)
class Names:
    """Names of tests, as an entry lists them."""

    by_place: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Iterable[str]) -> Self:
        """Arrange names by the directory, file or function before the brackets."""
        made = cls()
        for name in names:
            place, values = _split(name)
            made.by_place.setdefault(place, []).append((name, values))
        return made

    def matching(self, test: Collected) -> set[str]:
        """Return the names that include this test."""
        return {
            name
            for place in test.places()
            for name, values in self.by_place.get(place, ())
            if test.has(values)
        }


def left_out(chosen: Collection[Entry], tests: Iterable[Collected]) -> set[str]:
    """Return the names of the tests that these entries leave out."""
    # By place, for all entries together: each worker asks this for thousands of tests.
    listed: dict[str, list[tuple[int, bool, str]]] = {}
    for number, entry in enumerate(chosen):
        for names, is_kept in ((entry.tests, False), (entry.but, True)):
            for name in names:
                place, values = _split(name)
                listed.setdefault(place, []).append((number, is_kept, values))
    seen = [Counter[str]() for _ in chosen]
    cases = [entry.cases for entry in chosen]
    found: set[str] = set()
    for test in tests:
        inside, kept = set[int](), set[int]()
        for place in test.places():
            for number, is_kept, values in listed.get(place, ()):
                if test.has(values):
                    (kept if is_kept else inside).add(number)
        for number in sorted(inside - kept):
            seen[number][test.function] += 1
            if seen[number][test.function] > cases[number]:
                found.add(test.name)
                break
    return found


def stale(chosen: Collection[Entry], tests: Collection[Collected]) -> set[str]:
    """Return the names in entries that include no test, or none that the entry is about."""
    found: set[str] = set()
    for entry in chosen:
        inside = Names.of(entry.tests)
        about = [test for test in tests if inside.matching(test)]
        for names in (entry.tests, entry.but):
            arranged = Names.of(names)
            found |= set(names).difference(*(arranged.matching(test) for test in about))
    return found


def unproven(chosen: Collection[Entry], tests: Collection[Collected]) -> set[str]:
    """Return the rows that have tests, all of which these entries leave out."""
    gone = left_out(chosen, tests)
    proven = {row for test in tests if test.name not in gone for row in test.rows}
    return {row for test in tests for row in test.rows} - proven


def whole_files(chosen: Iterable[Entry]) -> set[str]:
    """Return the files that entries leave out completely; they need not even be collected."""
    return {
        f"tests/{name}"
        for entry in chosen
        if not entry.but and not entry.cases
        for name in entry.tests
        if name.endswith(".py")
    }


ALL_TESTS = pytest.StashKey[list[Collected]]()
"""Where a run keeps what it has collected, before marks deselect tests."""


class Marks:
    """The plugin that adds the marks."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Mark the tests of both lists, and keep what was collected for the tests of the lists."""
        tests = [Collected.of(item) for item in items]
        config.stash[ALL_TESTS] = tests
        for mark, chosen in ((REPEATED, ONLY_IN_TEST_ALL), (HEAVY, NOT_IN_CHECK)):
            gone = left_out(chosen, tests)
            for item, test in zip(items, tests, strict=True):
                if test.name in gone:
                    item.add_marker(mark)
