"""The page: the parts of a study, worded and put into the template."""

import base64
import dataclasses
import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from angpt.errors import UserError
from angpt.inference.sampling import Sampling
from angpt.inference.source import Source, open_source
from angpt.present import words as text
from angpt.present.charts import Absent, Chart, Drawn, address, write_chart
from angpt.present.layers import LayerHistory, alphas, input_norms, row_norms
from angpt.present.style import looks
from angpt.reports.evaluations import cell, read_evaluations
from angpt.reports.figures import budgets, costs, loss_curves
from angpt.reports.inside import look_inside
from angpt.reports.records import Material, read_material
from angpt.reports.samples import NEW_TOKENS, PROMPT_TOKENS, SEED, make_samples
from angpt.reports.training import recipes, training_curves
from angpt.results import RESULT, Result, Row, State
from angpt.system import write_atomically

ASSETS = Path(__file__).parent / "assets"
ENVIRONMENT = {
    "angpt": "angpt",
    "commit": "Commit",
    "python": "Python",
    "torch": "PyTorch",
    "cuda": "CUDA",
    "gpu": "GPU",
    "cpu": "CPU",
    "threads": "CPU threads",
    "platform": "System",
}
"""Keys of a run's environment in the order of the page, with its words for them."""


@dataclass(frozen=True)
class BudgetGroup:
    """The rows of the table of losses for one budget."""

    tokens: int
    rows: tuple[Row, ...]
    best: Row | None
    """That with the lowest mean, if there is something to compare."""


def write_page(
    study: Path,
    runs: Sequence[Path],
    result: Result,
    out: Path,
    commands: Sequence[str],
    tell: Callable[[str], None],
) -> Path:
    """Write `report.html` and `figures/` into `out`; the path of the page. `tell` is called with each stage of it."""
    tell("reading runs")
    link, result = partial(_result_uri, result), _sorted(result)
    material = read_material(runs, result)
    sources = open_sources(material)
    evaluations, layers = read_evaluations(material), _histories(material)
    charts = {
        "story": [loss_curves(material)],
        "speed": [budgets(material), costs(material)],
        "training": [training_curves(material)],
        "layers": [input_norms(layers), alphas(layers), row_norms(layers)],
    }
    tell("drawing figures")
    figures = out / "figures"
    figures.mkdir(parents=True, exist_ok=True)  # after everything has been read
    drawn: dict[str, list[Drawn | Absent]] = {
        part: [write_chart(c, figures) if isinstance(c, Chart) else c for c in mine] for part, mine in charts.items()
    }
    tell("measuring inside the models")
    inside = look_inside(material, sources, study, out)
    tell("generating text")
    samples = make_samples(material, sources)
    script = _script()
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["text"] = text
    environment.globals["cell"] = cell
    environment.filters["tied"] = text.tied
    page = environment.get_template("template.html").render(
        name=study.resolve().name,
        title=_title(result),
        result=result,
        facts=_facts(material),
        state=_state(result),
        groups=_groups(result),
        largest=max(map(result.largest_budget, result.sizes)),
        recipes=recipes(material),
        result_uri=link(figures),
        style=_asset("uplot/uPlot.min.css") + _asset("style.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        colors={a: look.color for a, look in looks(result.architectures).items()},
        figures=drawn,
        evaluations=evaluations,
        inside=inside,
        samples=samples,
        sampling=f"{NEW_TOKENS} tokens after the first {PROMPT_TOKENS} of a validation document, at temperature "
        f"{Sampling.temperature:g} among the {Sampling.top_k} likeliest tokens, seed {SEED}",
        commands=commands,
        setup=_setup(material),
        environment=_environment(material),
    )
    path = out / "report.html"
    write_atomically(path, page)
    return path


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _script() -> str:
    """The one script of the page: uPlot, under its licence, and our use of it."""
    return f"/*\n{_asset('uplot/LICENSE')}\n*/\n{_asset('uplot/uPlot.iife.min.js')}\n{_asset('figures.js')}"


def _sorted(result: Result) -> Result:
    """The result with its runs by budget, then architecture, then seed."""
    place = {architecture: i for i, architecture in enumerate(result.architectures)}
    runs = sorted(result.runs, key=lambda run: (run.tokens, place[run.architecture], run.seed))
    return dataclasses.replace(result, runs=tuple(runs))


def _result_uri(result: Result, figures: Path) -> str:
    """Where the page finds the result that it shows: in itself, or beside its figures if it is large."""
    text = json.dumps(dataclasses.asdict(result), indent=1)
    where = address(text, "application/json", f"{figures.name}/{RESULT}")
    (figures / RESULT).unlink(missing_ok=True)
    if not where.startswith("data:"):
        (figures / RESULT).write_text(text, encoding="utf-8")
    return where


def open_sources(study: Material) -> dict[str, Source]:
    """The models that are measured and sampled from, by the name of their run; those without a good checkpoint are
    left out. To open one reads its whole checkpoint for its checksum, so it is done once."""
    found = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*: diverged after")  # the page says so
        for run in study.representatives():
            with suppress(UserError):
                found[run.result.name] = open_source(run.record.path)
    return found


def _histories(study: Material) -> list[LayerHistory]:
    """The records of the layers of the run that stands for each architecture."""
    return [
        LayerHistory(text.label(r.architecture), r.architecture, r.name, r.tokens, r.seed, run.record.layers)
        for run in study.representatives()
        for r in [run.result]
    ]


def _title(result: Result) -> str:
    names = [text.label(a) for a in result.architectures]
    return f"{text.listed(names) if len(names) <= 4 else text.plural(len(names), 'architecture')} compared"


def _state(result: Result) -> str:
    """The number of runs that have ended in each way."""
    counts = Counter(run.status for run in result.runs)
    words = [f"{counts['finished']} of {text.plural(len(result.runs), 'run')} finished"]
    shown: dict[str, State] = {
        "diverged": "diverged",
        "unfinished": "stopped",
        "failed": "failed",
        "waiting": "waiting",
    }
    return ", ".join(words + [f"{counts[status]} {word}" for word, status in shown.items() if counts[status]])


def _facts(study: Material) -> list[str]:
    """Size, budgets, seeds and baseline, in a few words each."""
    result = study.result
    facts = []
    if sizes := sorted({cost.parameters for cost in result.costs}):
        low, high = text.quantity(sizes[0]), text.quantity(sizes[-1])
        facts.append(f"{low if low == high else f'{low} to {high}'} parameters")
    largest = max(map(result.largest_budget, result.sizes))
    facts.append(f"{text.listed([text.quantity(b) for b in result.budgets if b <= largest])} tokens")
    facts.append(text.plural(len(result.seeds), "seed"))
    longer = text.listed([text.quantity(b) for b in result.budgets if b > largest])
    facts.append(f"baseline {text.label(result.baseline)}" + (f", also with {longer} tokens" if longer else ""))
    return facts


def _groups(result: Result) -> list[BudgetGroup]:
    groups = []
    for tokens in result.budgets:
        rows = tuple(row for row in result.rows if row.tokens == tokens)
        means = {row: row.val_loss.mean for row in rows if row.val_loss is not None}
        groups.append(BudgetGroup(tokens, rows, min(means, key=means.__getitem__) if len(means) > 1 else None))
    return groups


def _setup(study: Material) -> dict[str, list[str]]:
    """The settings of the runs; several values where they differ."""
    configs = [run.record.config for run in study.runs]
    return {
        "Data": _values(c.data.path for c in configs),
        "Width d_m": _values(str(c.model.d_model) for c in configs),
        "Layers": _values(str(c.model.n_layers) for c in configs),
        "Heads": _values(str(c.model.n_heads) for c in configs),
        "Vocabulary": _values(f"{c.model.vocab_size:,}" for c in configs),
        "Context": _values(f"{c.model.context:,} tokens" for c in configs),
        "Batch": _values(f"{c.batch_tokens:,} tokens" for c in configs if c.batch_tokens is not None),
        "Precision": _values(f"{c.precision} on {c.device}" for c in configs),
    }


def _environment(study: Material) -> dict[str, list[str]]:
    found = [run.record.summary.environment for run in study.runs if run.record.summary is not None]
    names = [*ENVIRONMENT, *sorted({key for e in found for key in e} - set(ENVIRONMENT))]
    rows = {ENVIRONMENT.get(name, name): _values(e[name] for e in found if name in e) for name in names}
    return {name: values for name, values in rows.items() if values}


def _values(values: Iterable[str]) -> list[str]:
    """The different values, in the order of the runs."""
    return list(dict.fromkeys(values))
