"""Bad inputs, generated over every option and argument of every command and every key of every configuration file.

Each is refused in one line, and nothing has changed on disk; or it is accepted.
"""

import contextlib
import dataclasses
import io
import json
import re
from functools import cache

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from angpt.cli.main import main
from angpt.config import PrepareConfig, TrainConfig
from angpt.studies.config import Grid, Shape, StudyConfig
from tests.torture.harness import CASES, LONG, changes, few, run_briefly, snapshot
from tests.torture.material import CONFIG, STUDY, copied

FEW = 12
"""The short form has every twelfth option and key."""
SMALL = ("--context", "16", "--rounds", "1", "--architectures", "angpt")

COMMANDS = {
    "data prepare": ("text", "--out", "new", "--tokenizer", "bytes"),
    "data info": ("data",),
    "train": ("--config", "c.toml", "--out", "new"),
    "train ": ("--resume", "runs/cut"),
    "compare": ("--config", "c.toml", "--seeds", "0", "--budgets", "512", "--out", "new", "--workers", "1"),
    "study run": ("s.toml", "--out", "new", "--workers", "0"),
    "study status": ("study",),
    "study plan": ("s.toml",),
    "fit hparams": ("sweep.csv", "--out", "new"),
    "fit scaling": ("sweep.csv", "--out", "new", "--bootstrap", "10"),
    "report": ("runs/a", "runs/b", "--out", "new"),
    "analyze": ("runs/a", "--out", "new", "--tokens", "256", "--parts", "norms"),
    "eval": ("runs/a", "--data", "data"),
    "generate": ("runs/a", "tree", "--tokens", "4"),
    "serve": ("runs/a", "--port", "0"),
    "fold": ("runs/a", "--out", "new"),
    "export hf": ("runs/a", "--out", "new"),
    "import hf": ("export", "--out", "new"),
    "models": ("angpt",),
    "factors": ("--size", "32M", "--draws", "1"),
    "bench train": ("32M:1", "--steps", "1", "--warmup", "1", *SMALL),
    "bench optimizer": ("--rounds", "1", "--architectures", "angpt"),
    "bench moments": ("32M:1", *SMALL),
    "bench data": ("data", "--context", "16", "--rounds", "1"),
    "bench decode": ("--batches", "1", "--prompts", "4", "--tokens", "2", "--rounds", "1", "--no-transformers"),
}
"""Arguments with which each command succeeds quickly. (`train ` continues a run.)"""

NUMBERS = ["0", "-1", "1", "1e999", "inf", "-inf", "nan", "1e-9", "1.0001", str(2**40), str(10**15), str(2**63)]
NUMBERS += ["9" * 30, "9" * 400, "9" * 5000, "0x10", "1_000", "1e30x", "bpe:9999999999", "32M:0", "½", "٣", "0.5"]
PATHS = ["nowhere", "data", "runs/a", "runs/cut", "study", "folded", "export", "c.toml", "sweep.csv", "data/index.json"]
PATHS += [
    "text/00.txt",
    "c.toml/x",
    "/",
    "/dev/null",
    "/proc/self/mem",
    "/proc/nowhere/x",
    "..",
    "",
    "x" * 300,
    "a/" * 2000,
]
TEXTS = [
    "[/x]",
    "[bold]",
    ":smile:",
    "a\nb",
    "\x1b[31mred",
    "\udcff",
    "🙂",
    "-",
    "--",
    "%s",
    "{x}",
    " ",
    "None",
    "true",
    "\\",
]
WORDS = st.one_of(
    st.sampled_from(NUMBERS + PATHS + TEXTS),
    st.integers().map(str),
    st.floats().map(str),
    st.text(st.characters(exclude_characters="\0"), max_size=30),
)
"""Arguments that a person, a script or a cat may type."""

LITERALS = [number for number in NUMBERS if re.fullmatch(r"-?[0-9.]+(e[0-9]+)?|-?inf|nan|0x10|1_000", number)]
LITERALS += ["true", "[]", "[[]]", "{}", "{a = 1}", "1979-05-27", '""', '"\\u0000"', "[1, 'a']", "[nan]", "['']"]
LITERALS += ["[" * 2000 + "]" * 2000, "0x" + "f" * 5000, "{a = {a = {a = 1}}}", "[[1], [2]]", "'''\n\n'''"]
VALUES = st.one_of(
    st.sampled_from(LITERALS), WORDS.map(lambda text: json.dumps(text.encode(errors="replace").decode()))
)
"""Values of a key in a TOML file, as they are written there."""


@cache
def help_text(command):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    return out.getvalue()


def options(command):
    """The names of all options of a command, from its help."""
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][\w.-]*", help_text(command))) - {"--help"})


def keys(cls, prefix=""):
    """The dotted names of all keys of a configuration."""
    for field in dataclasses.fields(cls):
        inner = field.default_factory
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            yield from keys(inner, f"{prefix}{field.name}.")
        yield prefix + field.name


def edited(text, key, value):
    """The file with the value of a dotted key replaced or added."""
    table, _, name = key.rpartition(".")
    heading = "[[grid]]" if table == "grid" else f"[{table}]"
    head, found, rest = text.partition(f"{heading}\n") if table else ("", "", text)
    if table and not found:
        return f"{text}\n{heading}\n{name} = {value}\n"
    own, separator, others = rest.partition("\n[")
    own = re.sub(rf"(?m)^{re.escape(name)} = .*\n", "", own)
    return f"{head}{found}{name} = {value}\n{own}{separator}{others}"


class Place:
    """A copy of the material, made again when a command has changed it."""

    def __init__(self, material):
        self.material, self.stack = material, contextlib.ExitStack()
        self.renew()

    def renew(self):
        self.stack.close()
        self.folder = self.stack.enter_context(copied(self.material))
        self.before = snapshot(self.folder)

    def problem(self, args):
        """What is wrong with how a command ends; nothing may have changed if it refuses its input."""
        CASES["bad inputs"] += 1
        outcome = run_briefly(self.folder, *args)
        changed = changes(self.before, snapshot(self.folder))
        if changed:
            self.renew()
        if outcome.problem is not None:
            return f"angpt {args}: {outcome.problem}"
        return f"angpt {args}: {outcome.err}, and yet changed {changed}" if outcome.code == 2 and changed else None

    def problem_of_file(self, name, text, args):
        file = self.folder / name
        file.write_text(text, encoding="utf-8", errors="replace")
        self.before = snapshot(self.folder)
        problem = self.problem(args)
        return problem and f"{text}\n{problem}"


@pytest.fixture(scope="module")
def place(material):
    found = Place(material)
    yield found
    found.stack.close()


def passes(short, long):
    """How often each option or key gets another value. A case takes seconds: a failure is not made simpler."""
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.large_base_example]
    phases = [Phase.explicit, Phase.generate]
    examples = long if LONG else short
    return settings(max_examples=examples, derandomize=not LONG, suppress_health_check=checks, phases=phases)


def check(problems):
    found = [problem for problem in problems if problem is not None]
    assert not found, "\n\n".join(found)


def some(names, place):
    """All names in the long form, and a few of them in the short one, others at each place."""
    return names if LONG else names[place % FEW :: FEW]


def test_every_command_is_here():
    listed = re.search(r"\{([\w,\s]+)\}", help_text(""))[1].replace("\n", "").replace(" ", "").split(",")
    assert {command.split()[0] for command in COMMANDS} == set(listed)
    assert len(options("train")) > len(list(keys(TrainConfig)))
    # `PrepareConfig` is read from options only.
    assert {f"--{key.replace('_', '-')}" for key in keys(PrepareConfig)} <= set(options("data prepare"))


@pytest.mark.parametrize("command", few(COMMANDS, 4))
def test_the_arguments_that_are_changed_are_good_ones(place, command):
    args = [*command.split(), *COMMANDS[command]]
    outcome = run_briefly(place.folder, *args)
    assert outcome.code == 0, outcome
    place.renew()


@pytest.mark.parametrize("command", COMMANDS)
@passes(2, 3)
@given(data=st.data())
def test_options(place, command, data):
    """Each option with another value, or none, or two."""
    names = [*options(command), "--nonsense"]
    values = st.lists(WORDS, max_size=2) | WORDS.map(lambda word: [word])
    good = [*command.split(), *COMMANDS[command]]
    chosen = some(names, list(COMMANDS).index(command))
    check(place.problem([*good, option, *data.draw(values)]) for option in chosen)


@pytest.mark.parametrize("command", COMMANDS)
@passes(2, 3)
@given(data=st.data())
def test_arguments(place, command, data):
    """Each word of a good command line replaced by another one."""
    numbers = list(range(len(COMMANDS[command])))
    good, chosen = COMMANDS[command], some(numbers, list(COMMANDS).index(command))
    lines = [[*good[:number], data.draw(WORDS), *good[number + 1 :]] for number in chosen]
    check(place.problem([*command.split(), *line]) for line in lines)


RUN_KEYS = [*sorted(keys(TrainConfig)), "nonsense", "model.nonsense"]
STUDY_KEYS = [
    *(key for key in keys(StudyConfig) if not key.startswith("train.")),
    *(f"grid.{key}" for key in keys(Grid)),
]
STUDY_KEYS += [*(f"shapes.tiny.{key}" for key in keys(Shape)), "nonsense", "shapes.x.d_model", "train.seed"]


@passes(2, 3)
@given(data=st.data())
def test_keys_of_a_run(place, data):
    command = ["train", "--config", "c.toml", "--out", "new"]
    files = [edited(CONFIG, key, data.draw(VALUES)) for key in some(RUN_KEYS, 1)]
    check(place.problem_of_file("c.toml", file, command) for file in files)


@passes(2, 3)
@given(data=st.data())
def test_keys_of_a_study(place, data):
    command = ["study", "run", "s.toml", "--out", "new", "--workers", "0"]
    files = [edited(STUDY, key, data.draw(VALUES)) for key in some(STUDY_KEYS, 2)]
    check(place.problem_of_file("s.toml", file, command) for file in files)
