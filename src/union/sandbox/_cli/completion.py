"""``sbx completion``: scripts made from the command line itself, so that they cannot differ."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from union.sandbox._cli.parser import make_parser, verbs

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

__all__ = ["completion"]

_PLACES: Final = {"DIR": "directories", "PATH": "files", "SOURCE": "files", "TARGET": "files"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """One option or positional as a shell needs to know it."""

    names: tuple[str, ...]
    """Empty for a positional."""
    summary: str
    values: tuple[str, ...]
    """What may follow it, where that is a fixed set."""
    place: str
    """``files``, ``directories``, or empty: something else, or nothing."""
    takes_value: bool


def completion(options: argparse.Namespace) -> int:
    sys.stdout.write({"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell]())
    return 0


def _known() -> Iterator[tuple[str, str, list[_Option]]]:
    for name, (summary, actions) in verbs(make_parser()).items():
        yield name, summary, [_option(action) for action in actions]


def _option(action: argparse.Action) -> _Option:
    return _Option(
        names=tuple(action.option_strings),
        summary=(action.help or "").replace("%%", "%"),
        values=tuple(map(str, action.choices or ())),
        place=_PLACES.get(str(action.metavar), ""),
        takes_value=action.nargs != 0,
    )


# bash


def _bash() -> str:
    names, values, words = [], [], []
    for name, _, options in _known():
        names.append(name)
        words.append(f"        {name}) words={shlex.quote(_words(options))} ;;")
        for option in options:
            if option.names and option.takes_value:
                keys = "|".join(f'"{name} {key}"' for key in option.names)
                values.append(f"        {keys}) {_bash_values(option)}; return ;;")
    return _BASH.format(
        names=" ".join(names),
        one_of="|".join(names),
        values="\n".join(values),
        words="\n".join(words),
    )


def _words(options: list[_Option]) -> str:
    flags = [key for option in options for key in option.names]
    positional = [value for option in options if not option.names for value in option.values]
    return " ".join([*flags, *positional])


def _bash_values(option: _Option) -> str:
    if option.values:
        return f'COMPREPLY=($(compgen -W "{" ".join(option.values)}" -- "$current"))'
    if option.place == "directories":
        return 'COMPREPLY=($(compgen -d -- "$current"))'
    return 'COMPREPLY=($(compgen -f -- "$current"))' if option.place else "COMPREPLY=()"


_BASH: Final = """\
# bash completion of sbx
_sbx() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
    local command= words= at
    COMPREPLY=()
    for ((at = 1; at < COMP_CWORD; at++)); do
        case ${{COMP_WORDS[at]}} in
        --) return ;; # the command's own words: files
        {one_of}) [ -n "$command" ] || command=${{COMP_WORDS[at]}} ;;
        esac
    done
    case "$command $before" in
{values}
    esac
    case $command in
        "") words="{names} --help --version" ;;
{words}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _sbx sbx
"""


# zsh


def _zsh() -> str:
    names = [f"        {shlex.quote(f'{name}:{summary}')}" for name, summary, _ in _known()]
    cases = []
    for name, _, options in _known():
        specs = [spec for option in options for spec in _zsh_specs(option)]
        lines = "".join(f" \\\n            {shlex.quote(spec)}" for spec in specs)
        cases.append(f"    {name})\n        _arguments -S{lines}\n        ;;")
    return _ZSH.format(names="\n".join(names), cases="\n".join(cases))


def _zsh_specs(option: _Option) -> list[str]:
    if option.values:
        value = f":value:({' '.join(option.values)})"
    elif option.place:
        value = ":path:_files -/" if option.place == "directories" else ":path:_files"
    else:
        value = ":value: "
    summary = option.summary.replace("[", r"\[").replace("]", r"\]").replace(":", r"\:")
    if option.names:
        return [f"*{key}[{summary}]{value if option.takes_value else ''}" for key in option.names]
    return [f"*{value}"] if option.values or option.place else ["*::command:_normal"]


_ZSH: Final = """\
#compdef sbx
# zsh completion of sbx
_sbx() {{
    local -a commands
    commands=(
{names}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
{cases}
    esac
}}
if [ "$funcstack[1]" = _sbx ]; then _sbx "$@"; else compdef _sbx sbx; fi
"""


# fish


def _fish() -> str:
    lines = ["# fish completion of sbx"]
    for name, summary, options in _known():
        lines.append(
            f"complete -c sbx -n __fish_use_subcommand -f -a {name} -d {_fish_quote(summary)}"
        )
        seen = f"complete -c sbx -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{seen} {_fish_option(option)}" for option in options]
    return "\n".join(lines) + "\n"


def _fish_option(option: _Option) -> str:
    parts = []
    for key in option.names:
        parts += ["-l", key[2:]] if key.startswith("--") else ["-s", key[1:]]
    if option.values:
        parts += ["-x" if option.names else "-f", "-a", _fish_quote(" ".join(option.values))]
    elif option.place == "directories":
        parts += ["-x", "-a", "'(__fish_complete_directories)'"]
    elif option.names and option.takes_value:
        parts.append("-r")
    return " ".join([*parts, "-d", _fish_quote(option.summary)])


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
