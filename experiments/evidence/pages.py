"""Brings the pages of docs/evidence up to date: tables between their marks, and figures, from the run folders."""

from pathlib import Path

from angpt.present.style import styled
from angpt.present.tables import replace_marked
from experiments.evidence import eight_bits, figures, findings, paper, relatives, sweeps, tables
from experiments.evidence.exhibits import exhibits
from experiments.evidence.items import EVIDENCE
from experiments.evidence.results import Results

PAGES = (
    *(EVIDENCE / name for name in ("tuning.md", "report.md")),
    EVIDENCE.parents[1] / "README.md",
    *(EVIDENCE.parent / f"{name}.md" for name in ("evidence", "results", "hyperparameters", "optimizers")),
    *(EVIDENCE.parent / f"{name}.md" for name in ("fp8", "inference")),
)


def write(root: Path = EVIDENCE) -> None:
    """Bring all pages and figures up to date."""
    results = Results(root)
    found = marked(results)
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    with styled():
        for name, figure in figures.figures(results):
            path = root / "figures" / f"{name}.png"
            path.parent.mkdir(exist_ok=True)
            figure.savefig(path, metadata={"Software": None})


def filled(page: str, found: dict[str, str]) -> str:
    """A page with the tables whose marks it has."""
    for name, text in found.items():
        page = replace_marked(page, name, text)
    return page


def marked(results: Results) -> dict[str, str]:
    """All tables as Markdown, by their marks."""
    protocol = results.protocol
    made = {
        "state": tables.state(protocol),
        "trials": tables.trials(protocol),
        "choice": tables.choice(results),
        "against": findings.against(results),
        "losses": tables.losses(results),
        "primary": tables.tests(results, results.primary, adjusted=True),
        "secondary": tables.tests(results, results.secondary, adjusted=False),
        "speed-ups": tables.speed_ups(results),
        "ablation": tables.ablation(results),
        "steps": tables.improvements(results, "gpt+/no-qk-norm", paper.STEPS),
        "related": tables.improvements(results, "gpt+", paper.RELATED),
        "sensitivity": tables.sensitivity(protocol),
        "best-of": tables.best_of(protocol),
        "tasks": tables.tasks(results),
        "quantized": tables.quantized(results),
        "defaults": tables.defaults(results),
        "scaling": tables.scaling(results),
        "exhibits": exhibits(results),
        "rates": sweeps.rates(),
        "batches": sweeps.batches(),
        "batch-laws": sweeps.batch_laws(),
        "fp8": eight_bits.table(results.root, protocol.loss),
    }
    shown = {f"figure {name}": f"![{title}](figures/{name}.png)\n" for name, title in figures.titles(results).items()}
    return (
        {name: f"{table.markdown()}\n" for name, table in made.items()}
        | shown
        | {
            "progress": findings.progress(results),
            "findings": findings.findings(results),
            "weaknesses": findings.weaknesses(results),
            "tried": tables.tried(protocol),
            "relatives": relatives.table(protocol.loss),
        }
    )
