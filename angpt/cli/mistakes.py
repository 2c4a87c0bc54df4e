"""Mistakes on the command line in one line: what is wrong, what may have been meant, and which help to read."""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence

from angpt.errors import nearest

Options = Callable[[Sequence[str]], set[str]]
"""The options of a command, given by its words, such as ["data", "prepare"]."""


def parser_message(panel: str, command: Sequence[str], options_of: Options) -> str:
    """The parser's error about the options of a command, a title and sections in a box, in one line."""
    lines = (line.strip(" │╭╮╰╯") for line in panel.splitlines())
    text = "\n".join(re.sub(r"^─ .* ─+$", "-----", line) for line in lines)
    _, problem, *rest = (
        " ".join(part.split()) for part in re.split("^[─-]{5,}$", f"{text}\n-----", flags=re.MULTILINE)
    )
    available = next((section.partition(": ")[2] for section in rest if section.startswith("Available")), None)
    message = _reworded(problem, available, command, options_of)
    return f"{message} (see {' '.join(('angpt', *command))} --help)"


def _reworded(problem: str, available: str | None, command: Sequence[str], options_of: Options) -> str:
    """The parser's sentence, and, for an unknown name, the names that are near."""
    problem = problem.removesuffix(".").removesuffix(" (required)").removesuffix(".")
    if unknown := re.match("Unrecognized (?:or misplaced )?options: (.*)", problem):
        words = re.sub(r" \(applied to .*?\)", "", unknown[1].partition(" Arguments are applied")[0])
        name = re.split(", | ", words)[0]
        if available is not None and not name.startswith("-"):
            return f"unknown command {name!r}: {nearest(name, available.split(', '))}"
        if not name.startswith("--"):
            return f"unexpected {name!r}"
        return f"unknown option {name}{_similar(name, options_of(command))}"
    if bad := re.match(r"Error parsing ([^ /:]+).*?(?:to float|with base 10): ('.*')", problem):
        return f"{bad[1]}: {bad[2]} is not a {'whole ' if 'base 10' in problem else ''}number"
    if bad := re.match(r"Error parsing ([^ /:]+).*?: (.*)", problem):
        return f"{bad[1]}: {bad[2]}"
    if bad := re.match(r"invalid choice (.*) for argument '(.*?)'. Expected one of \((.*)\)", problem):
        return f"{bad[2]}: {bad[1]} is none of {bad[3].replace(chr(39), '').rstrip(',')}"
    if missing := re.match("Missing value for argument '(.*?)'", problem):
        return f"{missing[1]}: its value is missing"
    if missing := re.match(r"Missing from .*?: (--[-.a-z0-9]+ )?(\S+) (.*)", problem):
        return f"{missing[1] or ''}{missing[2]} is missing: {missing[3][0].lower()}{missing[3][1:]}"
    if choices := re.fullmatch(r"Expected one of \{(.*)\}", problem):
        return f"a command is missing: one of {choices[1]}"
    return problem


def _similar(option: str, known: Iterable[str]) -> str:
    """What follows an unknown option: those that end like it, are spelled like it, or abbreviate it."""
    name = option.partition("=")[0].replace("_", "-")
    known = sorted(known)
    near = [other for other in known if other.rpartition(".")[2] == name.removeprefix("--")]
    near += difflib.get_close_matches(name, known, n=2, cutoff=0.7)
    initials = "--" + "".join(word[0] for word in re.findall("[a-z]+", name))  # --learning-rate: --lr
    near += [other for other in known if other == initials]
    return f": did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""
