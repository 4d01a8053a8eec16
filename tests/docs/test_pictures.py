"""The terminal pictures are drawn correctly and contain no details of a machine."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest
from scripts import badges, pictures
from scripts.pictures import BRIGHT, COLOURS, INK, Look, Piece

SVG = "{http://www.w3.org/2000/svg}"


def test_rows_are_cut_where_the_look_changes_and_where_there_is_a_gap():
    assert pictures.pieces("a b   c\n\n  \x1b[1;32m$\x1b[0m ls \n\n\n") == [
        [Piece(0, "a b", Look()), Piece(6, "c", Look())],
        [],
        [Piece(2, "$", Look(COLOURS[2], bold=True)), Piece(4, "ls", Look())],
    ]


def test_a_look_lasts_until_it_is_changed():
    [[first], [second]] = pictures.pieces("\x1b[31mred\nstill\x1b[m")
    assert first.look == second.look == Look(COLOURS[1])


def test_sequences_that_are_no_colours_are_not_seen():
    assert pictures.pieces("\x1b[?25l\x1b(Bx\x0f\x1b[Ky\x1b[4mz") == [
        [Piece(0, "xy", Look()), Piece(2, "z", Look())]
    ]


@pytest.mark.parametrize(
    "codes, look",
    [
        ("", Look()),
        ("94", Look(BRIGHT[4])),
        ("31;39", Look()),
        ("1;2", Look(bold=True, dim=True)),
        ("1;22", Look()),
        ("38;5;9", Look(BRIGHT[1])),
        ("38;5;16", Look("#000000")),
        ("38;5;196", Look("#ff0000")),
        ("38;5;255", Look("#eeeeee")),
        ("38;2;1;2;255", Look("#0102ff")),
        ("48;5;196;1", Look(bold=True)),
        ("38", Look()),
        ("7", Look()),
    ],
)
def test_codes_become_a_look(codes: str, look: Look):
    assert pictures.looked(Look(), codes) == look


def test_the_picture_is_svg_with_every_piece_in_its_place():
    rows = pictures.pieces('<&">\n\x1b[2;33m  gone\x1b[0m  x')
    root = ET.fromstring(pictures.drawn(rows, columns=20, title="a <title>"))
    assert root.find(f"{SVG}title").text == "a <title>"
    texts = root.findall(f"{SVG}text")
    assert [text.text for text in texts] == ['<&">', "gone", "x"]
    first, gone, last = texts
    assert (first.get("fill"), gone.get("fill"), gone.get("opacity")) == (INK, COLOURS[3], "0.6")
    width = float(first.get("textLength")) / 4
    assert float(gone.get("x")) - float(first.get("x")) == pytest.approx(2 * width, abs=0.1)
    assert float(last.get("x")) - float(first.get("x")) == pytest.approx(8 * width, abs=0.1)
    assert float(gone.get("y")) - float(first.get("y")) == pictures.HEIGHT
    assert float(last.get("x")) + width < float(root.get("width"))
    assert float(gone.get("y")) < float(root.get("height"))


def test_nothing_of_the_machine_is_shown():
    text = "launcher yes: /srv/tree/a/b/program\nuv /opt/x\nLinux 6.1.2-build.7+x x86_64"
    assert pictures.neutral(text, hidden=("/srv/tree",)) == (
        "launcher yes: .../program\nuv /opt/x\nLinux 6.1.2 x86_64"
    )


@pytest.mark.parametrize("name", pictures.DIALOGUES)
def test_the_shipped_pictures_are_whole_and_ours(name: str):
    text = (pictures.TARGET / f"{name}.svg").read_text(encoding="utf-8")
    shown = [element.text for element in ET.fromstring(text).iter(f"{SVG}text")]
    assert shown[:2] == ["$", pictures.DIALOGUES[name][0]]
    assert not re.search(r"href|url\(|<script|<image", text), "it stands alone"


def test_a_recording_shows_commands_as_typed_and_output_when_it_came():
    rows = pictures.pieces("\x1b[1m$\x1b[0m one\nout\nmore\n[sbx] ~$ two\nlast")
    first, out, more, second, last = pictures.delays(rows, [2.0, 1.0])
    assert first > 0
    assert out == more == pytest.approx(first + 2.0)
    assert second > out
    assert last == pytest.approx(second + 1.0)
    root = ET.fromstring(pictures.drawn(rows, columns=20, title="t", taken=[2.0, 1.0]))
    groups = root.findall(f"{SVG}g")
    assert [group.get("class") for group in groups] == ["r"] * 5
    assert groups[1].get("style") == f"animation-delay:{out:.2f}s"


def test_the_readme_has_the_recording_and_current_badges():
    readme = (pictures.ROOT / "README.md").read_text(encoding="utf-8")
    shell = (pictures.TARGET / "shell.svg").read_text(encoding="utf-8")
    assert "docs/images/shell.svg" in readme
    assert "prefers-reduced-motion" in shell, "it is animated, and can be still"
    for path, text in badges.badges().items():
        assert path.read_text(encoding="utf-8") == text, "run `make docs`"
        assert f"docs/images/{path.name}" in readme


@pytest.mark.spec("H")
def test_the_readme_is_short_and_begins_with_the_product():
    readme = (pictures.ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) < 600
    opening = (
        "Run AI-generated code in an isolated sandbox in about a millisecond. No Docker, no root."
    )
    assert readme.index(opening) < readme.index("## Install") < readme.index("```python")
