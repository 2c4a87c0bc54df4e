"""Mistakes on the command line in one line: what is wrong, what may have been meant, and which help to read."""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence

from angpt.errors import nearest

Options = Callable[[Sequence[str]], set[str]]
"""The options of a command and, in capitals, its arguments without one, given by its words: ["data", "prepare"]."""
MEANT = {
    "epochs": "--tokens",
    "iterations": "--tokens",
    "max-steps": "--tokens",
    "steps": "--tokens",
    "max-new-tokens": "--tokens",
    "model": "--arch",
    "depth": "--model.n-layers",
    "layers": "--model.n-layers",
    "heads": "--model.n-heads",
    "hidden-size": "--model.d-model",
    "width": "--model.d-model",
    "vocab": "--model.vocab-size",
    "block-size": "--context",
    "seq-len": "--context",
    "sequence-length": "--context",
    "optimizer": "--architectures angpt:muon",
    "optimizer.name": "--architectures angpt:muon",
}
"""What other programs and commands call an option."""


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
            return f"unknown command {name!r}: {_similar_command(name, available.split(', '), command, options_of)}"
        if not re.match("-{1,2}[A-Za-z]", name):
            return f"unexpected {name!r}"
        return f"unknown option {name}{_similar(name, options_of(command))}"
    if bad := re.match(r"Error parsing ([^ /:]+).*?(?:to float|with base 10): ('.*')", problem):
        return f"{bad[1]}: {bad[2]} is not a {'whole ' if 'base 10' in problem else ''}number"
    if bad := re.match(r"Error parsing ([^ /:]+).*?: (.*)", problem):
        return f"{bad[1]}: {bad[2]}"
    if bad := re.match(r"invalid choice (.*) for argument '(.*?)'. Expected one of \((.*)\)", problem):
        return f"{bad[2]}: {bad[1]} is not one of {bad[3].replace(chr(39), '').rstrip(',')}"
    if missing := re.match("Missing value for argument '(.*?)'", problem):
        return f"{missing[1]}: its value is missing"
    if missing := re.match(r"Missing from .*?: (--[-.a-z0-9]+ )?(\S+) (.*)", problem):
        return f"{missing[1] or ''}{missing[2]} is missing: {missing[3][0].lower()}{missing[3][1:]}"
    if choices := re.fullmatch(r"Expected one of \{(.*)\}", problem):
        return f"a command is missing: one of {choices[1]}"
    return problem


def _similar_command(name: str, known: Sequence[str], command: Sequence[str], options_of: Options) -> str:
    """What follows an unknown command: an option of its name, the only command there is, or those spelled like it."""
    if f"--{name}" in options_of(command):
        return f"did you mean --{name}?"
    if len(known) == 1 and not difflib.get_close_matches(name, known, cutoff=0.5):
        return f"did you mean {' '.join(('angpt', *command, *known))} {name}?"
    return nearest(name, known)


def _similar(option: str, known: Iterable[str]) -> str:
    """What follows an unknown option: what it names, or the options that it begins, is spelled like or abbreviates."""
    word = option.partition("=")[0].replace("_", "-").lstrip("-").lower()
    last, known = word.rpartition(".")[2], sorted(known)
    for argument in known:
        if argument.isupper() and argument.lower().rstrip("s") == word.rstrip("s"):
            return f": give {argument} without an option"
    names = {other: other.removeprefix("--") for other in known if not other.isupper()}
    near = [other for other, name in names.items() if name.rpartition(".")[2] == last]
    near = near or [text for text in (MEANT.get(word, ""),) if text.partition(" ")[0] in names]
    near = near or [other for other, name in names.items() if len(last) > 1 and name.startswith(last.rstrip("s"))]
    if not near:
        near = difflib.get_close_matches(f"--{word}", names, n=2, cutoff=0.7)
        initials = "--" + "".join(part[0] for part in re.findall("[a-z]+", word))  # --learning-rate: --lr
        near += [other for other in names if other == initials]
    return f": did you mean {' or '.join(dict.fromkeys(near[:3]))}?" if near else ""
