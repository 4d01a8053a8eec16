"""Live output of several concurrent commands on one screen; Ctrl-C ends all of them.

    python examples/live_output.py [--backend userns] [COMMAND ...]

All commands run concurrently in one session. On a terminal each has a line with its last output,
redrawn as output arrives. In a pipe there is only the summary at the end. Ctrl-C ends every command
with all its processes; the exit code is then 130.

Prints::

    done     3 lines  count to three            three
    done     4 lines  a program in Python       100 %
    exit 3   1 lines  something that fails      stderr is shown as well
    done     2 lines  two processes, one pipe   from the second
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
from dataclasses import dataclass

from union import sandbox as sb

PERCENT = """python3 -uc '
import time
for percent in (25, 50, 75, 100):
    print(percent, "%")
    time.sleep(0.3)
'"""
COMMANDS = {
    "count to three": "for n in one two three; do echo $n; sleep 0.4; done",
    "a program in Python": PERCENT,
    "something that fails": "sleep 0.5; echo stderr is shown as well >&2; exit 3",
    "two processes, one pipe": "echo from the first; (sleep 0.6; echo from the second)",
}
REDRAW_S = 0.05


@dataclass(slots=True)
class Row:
    """The state of one command."""

    title: str
    command: str
    state: str = "waiting"
    lines: int = 0
    last: str = ""

    def __str__(self) -> str:
        return f"{self.state:<8} {self.lines} lines  {self.title:<25} {self.last}"


def printable(line: str) -> str:
    """Return a line without control characters, which could affect the terminal."""
    return "".join(c if c.isprintable() else " " for c in line)


class Screen:
    """Rows that are redrawn in place; nothing if stdout is not a terminal."""

    COLOURS = {"running": "36", "done": "32", "ended": "33"}  # noqa: RUF012 - never changed

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self._live = sys.stdout.isatty()
        self._drawn = False

    def draw(self) -> None:
        """Move to the first row and rewrite all rows."""
        if not self._live:
            return
        width = shutil.get_terminal_size().columns
        up = f"\x1b[{len(self._rows)}F" if self._drawn else ""
        text = ""
        for row in self._rows:
            colour = self.COLOURS.get(row.state, "31")
            # Truncate before adding colour: a wrapped row would break the row count.
            text += f"\x1b[{colour}m{str(row)[: width - 1]}\x1b[0m\x1b[K\n"
        sys.stdout.write(up + text)
        sys.stdout.flush()
        self._drawn = True

    async def keep_drawing(self) -> None:
        """Redraw at a fixed rate, however much the commands write."""
        while True:
            self.draw()
            await asyncio.sleep(REDRAW_S)

    def end(self) -> None:
        """Draw the final state."""
        if self._live:
            self.draw()
        else:
            print(*self._rows, sep="\n")


async def follow(sbx: sb.Session, row: Row, stop: asyncio.Event) -> None:
    """Run one command and update its row."""
    # One stream for stdout and stderr keeps their order. With PIPE, run() returns at the start.
    proc = await sbx.run(f"exec 2>&1\n{row.command}", stdout=sb.PIPE)
    row.state = "running"
    stopping = asyncio.create_task(stop.wait())
    stopping.add_done_callback(lambda task: task.cancelled() or proc.kill())
    async for line in proc.iter_stdout_lines():
        row.lines += 1
        row.last = printable(line)
    code = await proc.wait()
    stopping.cancel()
    row.state = "ended" if stop.is_set() else f"exit {code}" if code else "done"


async def main(commands: list[tuple[str, str]], backend: str) -> int:
    """Run all commands, each given with its title; return 130 after Ctrl-C."""
    rows = [Row(title, command) for title, command in commands]
    screen, stop = Screen(rows), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    async with sb.on_device.session(backend=backend) as sbx:
        drawing = asyncio.create_task(screen.keep_drawing())
        try:
            async with asyncio.TaskGroup() as group:
                for row in rows:
                    group.create_task(follow(sbx, row, stop))
        finally:
            drawing.cancel()
    screen.end()
    return 130 if stop.is_set() else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Live output of concurrent commands.")
    parser.add_argument("--backend", default="userns", help="isolation backend (default: userns)")
    parser.add_argument("command", nargs="*", help="shell text (default: four short ones)")
    args = parser.parse_args()
    chosen = [(printable(command)[:25], command) for command in args.command]
    sys.exit(asyncio.run(main(chosen or list(COMMANDS.items()), args.backend)))
