"""Train every architecture with three seeds in bf16 and in fp8, and print a table of the differences for docs/fp8.md.

    python experiments/fp8.py runs/fp8 --preset 32M --tokens 100M --data.path data/corpus

Options after the folder are those of `angpt train`. Runs that have ended are not repeated. One that diverged is
shown as such, and its pair does not count in the mean.
"""

import math
import statistics
import sys
from pathlib import Path

import angpt.cli.main
from angpt.cli.train import EXIT_DIVERGED
from angpt.training.record import RunRecord
from angpt.training.run import Run

ARCHITECTURES, SEEDS = ("angpt", "ngpt", "gpt+"), (0, 1, 2)
HEAD = """\
| | seed | bf16 | fp8 | fp8 − bf16 | the same of the last tenth of training | largest share that saturates |
|---|---|---|---|---|---|---|"""


def train(out: Path, options: list[str]) -> RunRecord:
    if out.exists() and (summary := Run.open(out).summary()) and summary.status != "interrupted":
        return RunRecord.open(out)
    try:
        angpt.cli.main.main(["train", *(("--resume", str(out)) if out.exists() else (*options, "--out", str(out)))])
    except SystemExit as ended:
        if ended.code not in (None, 0, EXIT_DIVERGED):
            raise
    return RunRecord.open(out)


def last_loss(run: RunRecord) -> float:
    """The validation loss at the end of a run; nan if it diverged."""
    assert run.summary is not None
    return run.evaluations[-1].loss if run.summary.status == "finished" else math.nan


def last_tenth(run: RunRecord) -> float:
    """The mean training loss of the last tenth of the steps: on the same batches in both precisions."""
    losses = [step.loss for step in run.steps]
    return statistics.mean(losses[-max(1, len(losses) // 10) :])


def saturated(run: RunRecord) -> str:
    """The largest share of the numbers of an input or output gradient that saturated in any layer at any time."""
    records = [record for record in Run.open(run.path).records() if record["kind"] == "fp8"]
    shares = {name: max(max(r[name]) for r in records) for name in records[0] if name.endswith("_saturated")}
    name = max(shares, key=lambda name: shares[name])
    return f"{shares[name]:.2g} ({name.removesuffix('_saturated')})"


def compare(out: Path, options: list[str]) -> None:
    print(HEAD)
    for architecture in ARCHITECTURES:
        differences = []
        for seed in SEEDS:
            own = ["--model.architecture", architecture, "--seed", str(seed), *options]
            precisions = {"bf16": ["bf16"], "fp8": ["fp8", "--record-fp8"]}
            pair = [
                train(out / f"{architecture}-{name}-s{seed}", [*own, "--precision", *chosen])
                for name, chosen in precisions.items()
            ]
            low, high = map(last_loss, pair)
            shown = ["diverged" if math.isnan(loss) else f"{loss:.4f}" for loss in (low, high)]
            if math.isnan(low - high):
                shown += ["", ""]
            else:
                differences.append((high - low, last_tenth(pair[1]) - last_tenth(pair[0])))
                shown += [f"{x:+.4f}" for x in differences[-1]]
            print(f"| {architecture} | {seed} | {' | '.join(shown)} | {saturated(pair[1])} |", flush=True)
        if len(differences) > 1:
            columns = zip(*differences, strict=True)
            means = [f"{statistics.mean(x):+.4f} ± {statistics.stdev(x) / len(x) ** 0.5:.4f}" for x in columns]
            count = f"mean, standard error of {len(differences)}"
            print(f"| {architecture} | {count} | | | {means[0]} | {means[1]} | |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    compare(Path(sys.argv[1]), sys.argv[2:])
