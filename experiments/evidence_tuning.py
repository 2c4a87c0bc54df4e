"""Tuning trials of docs/evidence.md: run those that are missing in one process (imports and compilation are paid once).

    python experiments/evidence_tuning.py runs/tuning --data data/tuning --seconds 600 --archive tuning.tar.xz
    python experiments/evidence_tuning.py docs/evidence/tuning --table docs/evidence/tuning.md

Trial n of every arm comes before trial n + 1 of any: a stop leaves the arms equal to within one trial. The same command
skips what has ended and goes on. Weights are removed; config.toml, metrics.jsonl and summary.json stay."""

import argparse
import gc
import json
import math
import shutil
import tarfile
import time
import tomllib
from pathlib import Path
from typing import Any

START = time.monotonic()
TRIALS = Path(__file__).resolve().parents[1] / "docs/evidence/trials.json"
ADAM = {  # log-uniform ranges; β₂ is 0.95 or 0.99
    "gpt+": {"optimizer.lr": (1e-3, 1.6e-2), "optimizer.weight_decay": (0.03, 1), "optimizer.warmup": (0.01, 0.2)},
    "ngpt": {"optimizer.lr": (4e-3, 6.4e-2), "model.stored_scale": (1 / 64, 1 / 4)},  # 1/√256 × 1/4 … 4
    "angpt": {"optimizer.lr": (3e-3, 4.8e-2), "model.stored_scale": (0.001, 0.03)},
}
MUON_LR = (7.5e-3, 0.12)
MUON = {
    arch: {"optimizer.lr": MUON_LR, "optimizer.adam_lr": space["optimizer.lr"]}
    | {key: value for key, value in space.items() if key != "optimizer.lr"}
    for arch, space in ADAM.items()
}
COUNT, SOBOL_SEED, TIE = 12, 20, 0.01  # TIE: trials within so many nats of the best of their arm are named beside it
COMMON = """
tokens = "80M"
batch_tokens = 65536
micro_batch = 32
eval_every = 245  # a fifth of the 1,221 steps
eval_tokens = 1_000_000_000  # all of the tuning split
checkpoint_every = 1221
layers_every = 0
model = {d_model = 256, n_layers = 6, n_heads = 4}
data = {tuning_split = 0.01}
optimizer = {}"""


def make_trials() -> dict[str, dict[str, Any]]:
    """Settings of every trial by name, a scrambled Sobol sequence for each arm, in the order in which they run."""
    from scipy.stats import qmc

    found = {}
    for optimizer, spaces in (("adam", ADAM), ("muon", MUON)):
        for arch, space in spaces.items():
            for i, point in enumerate(qmc.Sobol(len(space) + 1, rng=SOBOL_SEED).random(16)[:COUNT].tolist()):
                ranges = zip(point, space.items(), strict=False)
                values = {key: float(f"{low * (high / low) ** u:.3g}") for u, (key, (low, high)) in ranges}
                last = {"optimizer.beta2": 0.95 if point[-1] < 0.5 else 0.99}
                name = {"model.architecture": arch} | ({} if optimizer == "adam" else {"optimizer.name": optimizer})
                found[f"{arch}-{optimizer}-{i:02d}"] = {**name, **values, **last}
    return dict(sorted(found.items(), key=lambda item: item[0][-2:]))


def run_trials(trials: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    """Run what has not ended, until all is done or the next trial would not end before the time limit."""
    import torch

    from angpt.config import TrainConfig
    from angpt.serialization import from_dict
    from angpt.training import launch, reporter

    torch._dynamo.config.recompile_limit = 64  # so that code compiled for one trial may stay for the next:
    torch.compiler.reset = lambda: None  # `Trainer` resets the compiler because of a limit of eight
    overrides = {key: tomllib.loads(f"x = {value}")["x"] for key, _, value in (s.partition("=") for s in args.set)}
    wall = 45.0  # expected of the first trial
    for name, settings in trials.items():
        run, begin = args.runs / name, time.monotonic()
        if outcome(run)[0] in ("finished", "diverged"):
            continue
        if begin - START + 1.05 * wall > args.seconds:
            return print(f"{name} would not end within {args.seconds:g} s; the same command goes on from here")
        gc.collect()  # memory of the trial before, CUDA graphs included
        config = tomllib.loads(COMMON)
        for key, value in {**settings, "data.path": args.data, **overrides}.items():
            group, _, last = key.rpartition(".")
            (config[group] if group else config)[last] = value
        if launch.start(from_dict(TrainConfig, config), run, reporter.Quiet(), again=True).status == "interrupted":
            return print(f"{name}: interrupted; the same command goes on from here")
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        wall = time.monotonic() - begin
        print(f"{begin - START:5.0f} s + {wall:.1f} s {row(name, settings, run)}", flush=True)
        pack(args.runs, args.archive)
    return None


def pack(runs: Path, archive: Path) -> None:
    """Write the folders of all ended runs to a .tar.xz, whole or not at all."""
    part = archive.with_name(f".{archive.name}.part")
    with tarfile.open(part, "w:xz", preset=0) as tar:
        for summary in sorted(runs.glob("*/summary.json")):
            for file in sorted(summary.parent.glob("[!.]*.*")):
                tar.add(file, file.relative_to(runs))
    part.rename(archive)


def outcome(run: Path) -> tuple[str, float, dict[str, Any]]:
    """Status, tuning loss (infinite unless finished) and summary of a run."""
    found = json.loads(file.read_text()) if (file := run / "summary.json").exists() else {"status": "not run"}
    return found["status"], found["val_loss"] if found["status"] == "finished" else math.inf, found


def row(name: str, settings: dict[str, Any], run: Path) -> str:
    """A line of the table."""
    words = ", ".join(f"{key.partition('.')[2]} {value}" for key, value in settings.items() if str(value) not in name)
    status, loss, found = outcome(run)
    numbers = [
        f"{found.get(key) or 0:,.{n}f}" for key, n in (("seconds", 1), ("compile_seconds", 1), ("tokens_per_s", 0))
    ]
    return f"| {name} | {words} | {f'{loss:.4f}' if loss < math.inf else status} | {' | '.join(numbers)} |"


def table(trials: dict[str, dict[str, Any]], runs: Path) -> str:
    """All trials as Markdown, best first in each arm, and the best of each arm with those within `TIE` of it."""
    lines = ["| trial | settings | tuning loss | s of steps | s of compiling | tokens/s |", "|---|---|---|---|---|---|"]
    best = ["", f"| arm | trials that ran | best | tuning loss | within {TIE:g} of it |", "|---|---|---|---|---|"]
    for arm in dict.fromkeys(name[:-3] for name in trials):
        order = sorted((name for name in trials if name[:-3] == arm), key=lambda name: outcome(runs / name)[1])
        lines += [row(name, trials[name], runs / name) for name in order]
        ran = [name for name in order if outcome(runs / name)[0] != "not run"]
        losses = {name: outcome(runs / name)[1] for name in ran}
        ties = [name for name in ran[1:] if losses[name] <= losses[ran[0]] + TIE]
        best += [f"| {arm} | {len(ran)} | {name} | {losses[name]:.4f} | {', '.join(ties) or '–'} |" for name in ran[:1]]
    return "\n".join(lines + best) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder with a run folder for each trial")
    parser.add_argument("--data", help="folder of tokens (`angpt data prepare`); without it nothing is trained")
    parser.add_argument("--optimizer", choices=("adam", "muon"), help="only the arms with this optimizer")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no trial that would end after this")
    parser.add_argument(
        "--archive", type=Path, default="tuning.tar.xz", help="all ended runs, written after each trial"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="override settings, for a quick test")
    parser.add_argument("--table", type=Path, help="replace the tables of this page, which start with the first |")
    args = parser.parse_args()
    if not TRIALS.exists():
        TRIALS.write_text(json.dumps(make_trials(), indent=1) + "\n")
    trials = json.loads(TRIALS.read_text())
    if args.data:
        run_trials({name: s for name, s in trials.items() if f"-{args.optimizer or ''}" in name}, args)
    print(text := table(trials, args.runs))
    if args.table:
        args.table.write_text(args.table.read_text().partition("\n|")[0] + "\n" + text)


if __name__ == "__main__":
    main()
