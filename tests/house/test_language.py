"""The avoided words stay out of sources, pages and messages."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from scripts import language

if TYPE_CHECKING:
    from pathlib import Path


def test_no_page_source_or_message_contains_an_avoided_word():
    found = language.hits([language.ROOT / path for path in language.EVERYTHING])
    assert found == [], "\n".join(map(str, found))


def test_everything_that_people_read_is_looked_at():
    read = {path.relative_to(language.ROOT).as_posix() for path in language.files(
        language.ROOT / path for path in language.EVERYTHING
    )}  # fmt: skip
    assert {"README.md", "docs/index.md", "native/main.c", "src/union/sandbox/errors.py"} <= read
    assert any(path.endswith(".js") for path in read)


@pytest.mark.parametrize("word", language.AVOIDED)
@pytest.mark.parametrize("line", ["{}", "# It is {} that.", "x = {}_by(y)", '"{}."', "({}, b)"])
def test_an_avoided_word_is_found(word: str, line: str):
    assert language.avoided_in(line.format(word)) == [word]
    assert language.avoided_in(line.format(word.capitalize())) == [word]


@pytest.mark.parametrize(
    "line",
    [
        "aforesaid, unheard, retold, saidst",
        "swords of steel",
        'the user "nobody" owns it',
        '"nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin"',
        "nobody:nogroup",
    ],
)
def test_other_words_and_the_account_are_not(line: str):
    assert language.avoided_in(line) == []


def test_a_hit_names_the_file_the_line_and_the_word(tmp_path: Path, capsys):
    page = tmp_path / "page.md"
    page.write_text("fine\nnobody said so\n")
    assert language.main([str(page)]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert [re.search(r"page\.md:2: '(\w+)': nobody said so$", line)[1] for line in shown] == [
        "nobody",
        "said",
    ]
    page.write_text("fine\n")
    assert language.main([str(page)]) == 0


def test_a_path_that_is_not_there_is_an_error():
    with pytest.raises(FileNotFoundError):
        language.hits([language.ROOT / "no-such-page.md"])
