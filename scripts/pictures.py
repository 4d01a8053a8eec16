"""Draw the screenshots of `sbx` in the README from a real terminal, as SVG.

Run it as ``python -m scripts.pictures [NAME ...]`` after the output of `sbx` has changed. It needs
`tmux`, and a machine on which `sbx doctor` finds no problem. The pictures show the screen without
details of the machine: see ``neutral``.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs/images"
PLACE = Path("/tmp/project")
"""The directory of the session, which is visible in the pictures."""
LIMIT_S = 60.0

DIALOGUES = {
    "doctor": ("sbx doctor",),
    "shell": (
        "sbx run --python 'print(sum(range(10)))'",
        "sbx shell --work-dir .",
        "wc -l < orders.csv | tee count",
        "whoami; ls /home",
        "touch /usr/bin/mine",
        "curl https://example.com",
        "exit",
        "cat count",
    ),
}
ANIMATED = {"shell"}
"""Played as a recording, with the times of the real run."""
SIZES = {"doctor": (100, 48), "shell": (84, 30)}

# --- parsing the terminal output -------------------------------------------------------------

COLOURS = ("#3b4252", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#dcdfe4")
BRIGHT = ("#7f848e", "#ff7a85", "#b5e890", "#ffd68a", "#7cc4ff", "#de8ff5", "#6fd6e2", "#ffffff")
PAPER, INK = "#16181d", "#d7dae0"
_SGR = re.compile(r"\x1b\[([\d;]*)m")
_OTHER = re.compile(r"\x1b(?:\[[\d;?]*[A-Za-ln-z]|[()][A-Z0-9]|[=>])|[\x0e\x0f]")


@dataclass(frozen=True, slots=True)
class Look:
    """The style of characters."""

    colour: str = INK
    bold: bool = False
    dim: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Characters of one row with the same style, starting at ``column``."""

    column: int
    text: str
    look: Look


def palette(number: int) -> str:
    """Return one of the 256 terminal colours."""
    if number < 16:
        return (COLOURS + BRIGHT)[number]
    if number >= 232:
        return "#" + f"{8 + 10 * (number - 232):02x}" * 3
    levels = (0, 95, 135, 175, 215, 255)
    red, green, blue = (number - 16) // 36, (number - 16) // 6 % 6, (number - 16) % 6
    return f"#{levels[red]:02x}{levels[green]:02x}{levels[blue]:02x}"


def looked(look: Look, codes: str) -> Look:
    """Return the style after one escape sequence; unknown sequences are ignored."""
    numbers = iter([int(code or 0) for code in codes.split(";")])
    for number in numbers:
        if number == 0:
            look = Look()
        elif number in {1, 2}:
            look = replace(look, bold=number == 1 or look.bold, dim=number == 2 or look.dim)
        elif number == 22:
            look = replace(look, bold=False, dim=False)
        elif number in {38, 48}:
            kind = next(numbers, None)
            rest = [next(numbers, 0) for _ in range({5: 1, 2: 3}.get(kind or 0, 0))]
            if number == 38 and rest:
                colour = palette(rest[0]) if kind == 5 else "#" + bytes(rest).hex()
                look = replace(look, colour=colour)
        elif 30 <= number <= 37 or 90 <= number <= 97:
            look = replace(look, colour=(COLOURS if number < 90 else BRIGHT)[number % 10])
        elif number == 39:
            look = replace(look, colour=INK)
    return look


def pieces(text: str) -> list[list[Piece]]:
    """Return the rows of a screen, without trailing empty rows."""
    rows, look = [], Look()
    for line in _OTHER.sub("", text).rstrip().split("\n"):
        row, column = [], 0
        for number, part in enumerate(_SGR.split(line)):
            if number % 2:
                look = looked(look, part)
                continue
            # SVG collapses spaces, so wider gaps are made by position.
            row += [
                Piece(column + words.start(), words[0], look)
                for words in re.finditer(r"\S+(?: \S+)*", part)
            ]
            column += len(part)
        rows.append(row)
    return rows


# --- SVG -------------------------------------------------------------------------------------

WIDTH, HEIGHT, MARGIN, BAR = 8.4, 20, 18, 30
STYLE = 'font-size="14" font-family="ui-monospace,Menlo,Consolas,DejaVu Sans Mono,monospace"'


PLAY = """\
<style>
.r { animation: shown 1ms linear both }
@keyframes shown { from { visibility: hidden } to { visibility: visible } }
@media (prefers-reduced-motion: reduce) { .r { animation: none } }
</style>"""
_TYPING_S = 0.05
"""Per character of a command: the speed of a quick typist."""
_PAUSE_S = 0.7
PROMPT = re.compile(r"(\[sbx\] \S*)?\$( |$)")


def delays(rows: list[list[Piece]], taken: list[float]) -> list[float]:
    """Return when each row appears, in seconds: a command when it is typed, then its output.

    Args:
        rows: the rows of the screen.
        taken: how long each command really took, in seconds.

    """
    found, now, end = [], 0.0, 0.0
    spans = iter(taken)
    for row in rows:
        text = " ".join(piece.text for piece in row)
        if PROMPT.match(text):
            now = end + _TYPING_S * len(text)
            found.append(now)
            now += next(spans, 0.0)
            end = now + _PAUSE_S
        else:
            found.append(now)
    return found


def drawn(
    rows: list[list[Piece]], *, columns: int, title: str, taken: list[float] | None = None
) -> str:
    """Return a window with the rows as SVG; with ``taken`` they appear one by one, once."""
    width = round(columns * WIDTH + 2 * MARGIN)
    height = len(rows) * HEIGHT + BAR + MARGIN
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {STYLE}>',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
    ]
    for number, colour in enumerate(("#e06c75", "#e5c07b", "#98c379")):
        lines.append(f'<circle cx="{MARGIN + 4 + number * 18}" cy="16" r="5" fill="{colour}"/>')
    appear = None if taken is None else delays(rows, taken)
    if appear is not None:
        lines.append(PLAY)
    for number, row in enumerate(rows):
        if appear is not None:
            lines.append(f'<g class="r" style="animation-delay:{appear[number]:.2f}s">')
        y = BAR + (number + 1) * HEIGHT - 5
        for piece in row:
            extra = ' font-weight="bold"' if piece.look.bold else ""
            extra += ' opacity="0.6"' if piece.look.dim else ""
            # A fixed length keeps the columns aligned in any font.
            lines.append(
                f'<text x="{MARGIN + piece.column * WIDTH:.1f}" y="{y}" '
                f'textLength="{len(piece.text) * WIDTH:.1f}" fill="{piece.look.colour}"{extra}>'
                f"{escape(piece.text)}</text>"
            )
        if appear is not None:
            lines.append("</g>")
    return "\n".join([*lines, "</svg>", ""])


def neutral(text: str, *, hidden: tuple[str, ...]) -> str:
    """Remove details of this machine: local paths, and the build of the kernel."""
    for place in hidden:
        text = re.sub(rf"{re.escape(place)}/(?:[\w.-]+/)*", ".../", text)
    return re.sub(r"(Linux \d+\.\d+(?:\.\d+)?)[^\s]*", r"\1", text)


# --- the terminal ----------------------------------------------------------------------------


class Terminal:
    """A tmux window with a plain shell."""

    def __init__(self, scratch: str, columns: int, rows: int) -> None:
        self._socket = f"{scratch}/tmux"
        rc = Path(scratch, "rc")
        rc.write_text(r"PS1='\[\e[1;32m\]$\[\e[0m\] '" + "\n", encoding="utf-8")
        size = ("-x", str(columns), "-y", str(rows))
        shell = f"exec bash --noprofile --rcfile {rc}"
        self.tmux("-f", "/dev/null", "new-session", "-d", *size, "-c", str(PLACE), shell)

    def tmux(self, *arguments: str) -> str:
        """Send one command to the tmux server of this window."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.run(
            ["tmux", "-S", self._socket, *arguments],
            env={**os.environ, "PATH": path, "SHELL": "/bin/bash", "LC_ALL": "C.UTF-8"},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
        ).stdout

    def prompts(self) -> int:
        """Return the number of prompts on the screen; 0 unless the last line is a prompt."""
        lines = self.tmux("capture-pane", "-p").rstrip().splitlines()
        found = [line for line in lines if re.match(r"(\[sbx\] \S*)?\$( |$)", line)]
        return len(found) if lines and re.fullmatch(r"(\[sbx\] \S*)?\$", lines[-1]) else 0

    def enter(self, command: str) -> None:
        """Type a line at the prompt and wait for the next prompt."""
        self._until(1)
        before = self.prompts()
        self.tmux("send-keys", "-l", command)
        self.tmux("send-keys", "Enter")
        self._until(before + 1)

    def _until(self, prompts: int) -> None:
        end = time.monotonic() + LIMIT_S
        while self.prompts() < prompts:
            if time.monotonic() > end:
                raise TimeoutError(f"no prompt:\n{self.tmux('capture-pane', '-p')}")
            time.sleep(0.1)


@contextlib.contextmanager
def terminal(columns: int, rows: int) -> Iterator[Terminal]:
    """Open a window in a directory with a table; remove both at the end."""
    PLACE.mkdir()  # An existing directory belongs to another program, so it is an error.
    try:
        (PLACE / "orders.csv").write_text("item,amount\nlamp,250\ndesk,490\n", encoding="utf-8")
        with tempfile.TemporaryDirectory(prefix="pictures-") as scratch:
            window = Terminal(scratch, columns, rows)
            try:
                yield window
            finally:
                window.tmux("kill-server")
    finally:
        subprocess.run(["rm", "-rf", "--", str(PLACE)], check=True)


def main(names: list[str]) -> None:
    """Draw the named pictures, or all."""
    for name in names or list(DIALOGUES):
        with terminal(*SIZES[name]) as window:
            taken = []
            for command in DIALOGUES[name]:
                begun = time.monotonic()
                window.enter(command)
                taken.append(time.monotonic() - begun)
            screen = window.tmux("capture-pane", "-p", "-e")
        # The last prompt has no command, so it is omitted.
        rows = pieces(neutral(screen, hidden=(str(ROOT), str(Path.home()))))[:-1]
        target = TARGET / f"{name}.svg"
        picture = drawn(
            rows,
            columns=SIZES[name][0],
            title=f"A terminal: {DIALOGUES[name][0]}",
            taken=taken if name in ANIMATED else None,
        )
        target.write_text(picture, encoding="utf-8")
        print(f"{target.relative_to(ROOT)}: {len(rows)} rows, {len(picture) // 1024} KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
