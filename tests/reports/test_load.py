"""The pages of studies of 2,000 runs: CPU time and memory of the command. Needs a quiet machine."""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from angpt.data.loader import Batch
from angpt.models.variants import build
from angpt.studies.study import Study
from angpt.training import checkpoint
from angpt.training.layers import layer_scalars
from angpt.training.run import Run, Summary
from angpt.training.strategy import SingleProcess
from tests.reports.synthetic import grown, make_data

SECONDS, MORE_SECONDS, MEGABYTES = 30.0, 7.0, 500.0
"""Most CPU time of a study with one page and of each further page, and most memory."""
STUDY = """
baseline = "gpt+"

[[grid]]
architectures = ["gpt+", "angpt"]
sizes = {sizes}
budgets = ["2048", "4096", "8192", "16384", "32768"]
batches = [256]
lrs = [0.004, 0.008, 0.016, 0.032, 0.064]
seeds = {seeds}

[shapes]
a = {{d_model = 16, n_layers = 1, n_heads = 2}}
b = {{d_model = 32, n_layers = 1, n_heads = 2}}
c = {{d_model = 32, n_layers = 2, n_heads = 2}}
d = {{d_model = 64, n_layers = 2, n_heads = 2}}

[train]
eval_tokens = 512
device = "cpu"

[train.model]
vocab_size = 257
context = 32

[train.data]
path = {data}
"""
"""2 architectures, 5 budgets of 8 to 128 steps and 5 learning rates, for each size and seed."""


def make_study(folder: Path, sizes: str) -> Path:
    """The folder of a study whose 2,000 runs have invented losses, with the checkpoints that the pages read."""
    data, file = make_data(folder / "data"), folder / "study" / "study.toml"
    file.parent.mkdir()
    seeds = list(range(2000 // (2 * 5 * 5 * len(sizes))))
    file.write_text(STUDY.format(data=json.dumps(str(data)), sizes=list(sizes), seeds=seeds))
    study, rng, models = Study.open(file.parent), random.Random(0), {}
    jobs = list(study.planned())
    assert len(jobs) == 2000
    for job in jobs:
        plan, config = job.plan, job.config
        run, batch = Run.create(job.folder, plan.config), plan.batch_tokens
        if config.model not in models:
            model = build(config.model)
            zeros = torch.zeros(1, 8, dtype=torch.long)
            models[config.model] = model, layer_scalars(model, Batch(zeros, zeros, None), SingleProcess())
        model, scalars = models[config.model]
        best = 0.016 * (1 if config.model.architecture == "angpt" else 0.7)
        floor = 3 - 0.1 * math.log2(config.model.d_model * plan.steps) + 0.02 * math.log2(plan.peak_lr / best) ** 2
        floor -= 0.1 * (config.model.architecture == "angpt") + rng.gauss(0, 0.01)
        lines = []
        for step in range(plan.steps + 1):
            progress = step / plan.steps
            loss = floor + 3 * math.exp(-5 * progress)
            head = {"step": step, "tokens": step * batch}
            if step % max(1, plan.steps // 8) == 0:
                lines.append({"kind": "layers", **head, **grown(scalars, progress)})
                lines.append({"kind": "val", **head, "val_loss": loss, "seconds": 0.01 * step})
            if step:
                steps = {"loss": loss + rng.gauss(0, 0.05), "lr": plan.peak_lr, "grad_norm": 1 + rng.random()}
                lines.append({"kind": "train", **head, **steps, "mfu": None, "seconds": 0.01 * step})
        run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        saved = None
        if config.seed == 0 and plan.steps == 128:
            state = checkpoint.State(plan.steps, config.model.architecture, 0, 1.28, floor, "", None, {}, config)
            saved = checkpoint.save(run.checkpoints, model.state_dict(), {}, state, keep=1).name
        tokens, seconds = plan.steps * batch, 0.01 * plan.steps * (1 + 0.1 * rng.random())
        run.write_summary(
            Summary("finished", plan.steps, plan.steps, tokens, floor, seconds, 0.0, tokens / seconds, 0.5,
                    plan.parameters, plan.flops_per_token, saved, {"angpt": "0", "cpu": "some"})
        )  # fmt: skip
    return study.folder


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("sizes", ["d", "abcd"])
def test_the_pages_of_two_thousand_runs(tmp_path, sizes):
    """A page for each size: CPU time of the command, on all its threads, and its largest memory, as the kernel counts
    them."""
    study = make_study(tmp_path, sizes)
    command = [sys.executable, "-m", "angpt", "report", str(study)]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    seconds, megabytes = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6
    pages = [page.stat().st_size / 1e6 for page in study.rglob("report.html")]
    print(f"{seconds:.1f} s, {megabytes:.0f} MB, pages of {min(pages):.2f} to {max(pages):.2f} MB")
    assert len(pages) == len(sizes)
    assert max(pages) < 3
    assert seconds < SECONDS + MORE_SECONDS * (len(pages) - 1)
    assert megabytes < MEGABYTES
