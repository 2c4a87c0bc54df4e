"""The page: the parts of a study, worded and put into the template."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from angpt.inference.sampling import Sampling
from angpt.present import words as text
from angpt.present.charts import Absent, Chart, Drawn, write_chart
from angpt.present.layers import alphas, input_norms, row_norms
from angpt.present.style import looks
from angpt.report.evaluations import cell, read_evaluations
from angpt.report.figures import budgets, costs, loss_curves
from angpt.report.inside import look_inside
from angpt.report.records import Study, layer_histories, read_study
from angpt.report.samples import NEW_TOKENS, PROMPT_TOKENS, SEED, make_samples
from angpt.studies.results import Cell, Result
from angpt.system import write_atomically

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
"""What a run notes of its environment, in the order and words of the page."""


@dataclass(frozen=True)
class BudgetGroup:
    """The rows of the table of losses for one budget."""

    budget: int
    cells: tuple[Cell, ...]
    best: str | None
    """The architecture with the lowest mean, if there is something to compare."""


def write_page(study: Path, runs: Sequence[Path], result: Result, out: Path, commands: Sequence[str]) -> Path:
    """Write `report.html` and `figures/` into `out`; the path of the page."""
    material = read_study(runs, result)
    figures = out / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    layers = layer_histories(material)
    charts = [loss_curves(material), budgets(material), input_norms(layers), alphas(layers), row_norms(layers)]
    charts.append(costs(material))
    drawn: list[Drawn | Absent] = [write_chart(c, figures) if isinstance(c, Chart) else c for c in charts]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
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
        colors={a: look.color for a, look in looks(result.architectures).items()},
        figures=drawn,
        evaluations=read_evaluations(material),
        inside=look_inside(material, study, out),
        samples=make_samples(material),
        sampling=f"{NEW_TOKENS} tokens after the first {PROMPT_TOKENS} of a validation document, at temperature "
        f"{Sampling.temperature:g} among the {Sampling.top_k} likeliest tokens, seed {SEED}",
        commands=commands,
        setup=_setup(material),
        environment=_environment(material),
    )
    path = out / "report.html"
    write_atomically(path, page)
    return path


def _title(result: Result) -> str:
    names = [text.label(a) for a in result.architectures]
    return f"{text.listed(names) if len(names) <= 4 else text.plural(len(names), 'architecture')} compared"


def _state(result: Result) -> str:
    """How many runs have ended, and how."""
    counts = {status: sum(run.status == status for run in result.runs) for status in ("finished", "diverged")}
    unfinished = sum(run.status == "interrupted" for run in result.runs)
    waiting = sum(run.status == "waiting" for run in result.runs)
    words = [f"{counts['finished']} of {text.plural(len(result.runs), 'run')} finished"]
    words += [f"{n} {word}" for n, word in
              ((counts["diverged"], "diverged"), (unfinished, "unfinished"), (waiting, "waiting")) if n]  # fmt: skip
    return ", ".join(words)


def _facts(study: Study) -> list[str]:
    """What was compared, in a few words each."""
    result = study.result
    facts = []
    if sizes := sorted({cost.parameters for cost in result.costs}):
        low, high = text.quantity(sizes[0]), text.quantity(sizes[-1])
        facts.append(f"{low if low == high else f'{low} to {high}'} parameters")
    facts.append(f"{text.listed([text.quantity(b) for b in result.budgets])} tokens")
    facts.append(text.plural(len(result.seeds), "seed"))
    facts.append(f"baseline {text.label(result.baseline)}")
    return facts


def _groups(result: Result) -> list[BudgetGroup]:
    groups = []
    for budget in result.budgets:
        cells = tuple(cell for cell in result.cells if cell.budget == budget)
        means = {cell.architecture: cell.val_loss.mean for cell in cells if cell.val_loss is not None}
        groups.append(BudgetGroup(budget, cells, min(means, key=means.__getitem__) if len(means) > 1 else None))
    return groups


def _setup(study: Study) -> dict[str, list[str]]:
    """The settings of the runs; several values where they differ."""
    configs = [run.config for run in study.runs]
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


def _environment(study: Study) -> dict[str, list[str]]:
    found = [run.summary.environment for run in study.runs if run.summary is not None]
    names = [*ENVIRONMENT, *sorted({key for e in found for key in e} - set(ENVIRONMENT))]
    rows = {ENVIRONMENT.get(name, name): _values(e[name] for e in found if name in e) for name in names}
    return {name: values for name, values in rows.items() if values}


def _values(values: Iterable[str]) -> list[str]:
    """The different values, in the order of the runs."""
    return list(dict.fromkeys(values))
