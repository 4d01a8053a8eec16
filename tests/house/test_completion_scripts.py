"""The committed completion scripts match the parser."""

from __future__ import annotations

from scripts import completion

from union.sandbox._cli.host_commands import completion_script
from union.sandbox._cli.parser import SHELLS


def test_completion_scripts_are_up_to_date():
    expected = completion.scripts()
    assert len(expected) == len(SHELLS)
    committed = {path: path.read_text(encoding="utf-8") for path in expected}
    assert committed == expected, "run: python -m scripts.completion"


def test_completion_scripts_are_the_ones_that_sbx_prints():
    assert {str(completion_script(shell)) for shell in SHELLS} == set(
        map(str, completion.scripts())
    )


def test_completion_scripts_contain_no_path_of_this_machine():
    for text in completion.scripts().values():
        assert str(completion.ROOT) not in text
