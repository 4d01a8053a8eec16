"""Write the command line page: the ``--help`` texts, the same under every Python version."""

from __future__ import annotations

import argparse
import re

from scripts.reference.docstrings import code

from union.sandbox._cli.parser import make_parser
from union.sandbox.server import _config

INTRO = """\
# Command lines

<!-- Written by `make docs` from the `--help` texts. -->

`sbx` is the command line for terminal users and scripts; see [the guide](../guides/sbx.md).
`sandbox-server`, also available as `sbx serve`, runs sessions for other programs; see
[remote sessions](../guides/remote.md).
"""
SERVE = "An alias of `sandbox-server`, with the same options: see [below](#sandbox-server)."


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return parser._actions  # noqa: SLF001 - argparse has no public way


def _name(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ", ".join(f"`{option}`" for option in action.option_strings)
    word = action.metavar or action.dest.upper()
    if action.choices is not None and action.metavar is None:
        word = "|".join(map(str, action.choices))
    if not action.option_strings:
        return code(str(word))
    *short, last = action.option_strings
    return ", ".join([*map(code, short), code(f"{last} {word}")])


def table(parser: argparse.ArgumentParser) -> str:
    """Return every argument with its help."""
    rows = ["| option | |", "|---|---|"]
    for action in _actions(parser):
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):  # noqa: SLF001
            continue
        text = (action.help or "").replace("%(default)s", str(action.default))
        rows.append(f"| {_name(action)} | {text} |")
    return "\n".join(rows) if len(rows) > 2 else ""


def _examples(epilog: str | None) -> str:
    return f"```text\n{epilog.strip()}\n```" if epilog else ""


def page() -> str:
    """Return the whole page."""
    top = make_parser()
    parts = [INTRO, "## sbx", str(top.description), table(top), _examples(top.epilog)]
    (commands,) = (
        action
        for action in _actions(top)
        if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001
    )
    for name, parser in commands.choices.items():
        parts.append(f"## sbx {name}")
        if name == "serve":
            parts.append(SERVE)
            continue
        words = [str(a.metavar or a.dest) for a in _actions(parser) if not a.option_strings]
        usage = parser.usage or " ".join(["sbx", name, "[options]", *words])
        parts += [f"    {usage}", parser.description, table(parser), _examples(parser.epilog)]
    server = _config._parser()  # noqa: SLF001 - the command line itself
    parts += ["## sandbox-server", str(server.description), table(server), str(server.epilog)]
    text = "\n\n".join(part.strip("\n") for part in parts if part) + "\n"
    return re.sub(r"\n{3,}", "\n\n", text)
