"""Train every architecture with three seeds in bf16 and in fp8, and print a table of the differences for docs/fp8.md.

    python experiments/fp8.py runs/fp8 --preset 32M --tokens 100M --data.path data/corpus

Options after the folder are those of `angpt train`. Runs that have ended are not repeated.
"""

import statistics
import sys
from pathlib import Path

import angpt.cli.main
from angpt.training.record import RunRecord

ARCHITECTURES, SEEDS = ("angpt", "ngpt", "gpt+"), (0, 1, 2)


def train(out: Path, options: list[str]) -> RunRecord:
    try:
        angpt.cli.main.main(["train", *(("--resume", str(out)) if out.exists() else (*options, "--out", str(out)))])
    except SystemExit as ended:
        if ended.code:
            raise
    return RunRecord.open(out)


def last_tenth(run: RunRecord) -> float:
    """The mean training loss of the last tenth of the steps: on the same batches in both precisions."""
    losses = [step.loss for step in run.steps]
    return statistics.mean(losses[-max(1, len(losses) // 10) :])


def compare(out: Path, options: list[str]) -> None:
    print("| | seed | bf16 | fp8 | fp8 − bf16 | the same of the last tenth of training |\n|---|---|---|---|---|---|")
    for architecture in ARCHITECTURES:
        differences = []
        for seed in SEEDS:
            own = ["--model.architecture", architecture, "--seed", str(seed), *options]
            precisions = {"bf16": ["bf16"], "fp8": ["fp8", "--record-fp8"]}
            pair = [
                train(out / f"{architecture}-{name}-s{seed}", [*own, "--precision", *chosen])
                for name, chosen in precisions.items()
            ]
            low, high = (run.evaluations[-1].loss for run in pair)
            differences.append((high - low, last_tenth(pair[1]) - last_tenth(pair[0])))
            shown = " | ".join(f"{x:+.4f}" for x in differences[-1])
            print(f"| {architecture} | {seed} | {low:.4f} | {high:.4f} | {shown} |", flush=True)
        columns = zip(*differences, strict=True)
        means = [f"{statistics.mean(x):+.4f} ± {statistics.stdev(x) / len(x) ** 0.5:.4f}" for x in columns]
        print(f"| {architecture} | mean, standard error | | | {means[0]} | {means[1]} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    compare(Path(sys.argv[1]), sys.argv[2:])
