"""The queue of docs/evidence: its order, its limits, and what it leaves of each run."""

import contextlib
import dataclasses
import gzip
import json
import math
import os
import re
import signal
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from angpt.analysis.analyse import Analysis
from angpt.errors import UserError
from angpt.evaluation.results import Evaluated, read_results, write_results
from angpt.evaluation.results import Results as Evaluation
from angpt.training.run import Run
from experiments.evidence import inside, pages, paper, queue, relatives, tables, tokens
from experiments.evidence.__main__ import main
from experiments.evidence.protocol import BUDGETS, EVIDENCE, Protocol
from experiments.evidence.queue import Queue, Speed, pack, rehearsal, thinned
from experiments.evidence.results import Results
from experiments.evidence.trials import ARMS, TRIED
from tests.test_evidence import stored, tuned, write

PROTOCOL = (EVIDENCE.parent / "evidence.md").read_text(encoding="utf-8")


@pytest.fixture
def trained(monkeypatch):
    """Runs take no time and have made-up losses; the names of those that ran, in their order."""
    order = []

    def bring_to_end(job, reporter):
        order.append(job.folder.relative_to(job.folder.parents[1]).as_posix())
        write(job.folder, job.config)
        (job.folder / "metrics.jsonl").write_text(
            '{"kind": "train", "step": 1, "tokens": 9, "loss": 4.5, "grad_norm": 1.5}\n'
        )
        (job.folder / "checkpoints" / "step-1").mkdir(parents=True)
        return Run(job.folder).summary()

    monkeypatch.setattr(queue, "bring_to_end", bring_to_end)

    def look_inside(item, folder, requests):
        order.append(f"inside {folder.name}")
        for path in inside.measured(item):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text("{}")
            for task in paper.TASKS if path.name == "results.json" else ():
                (folder / path.parent / "scores").mkdir(exist_ok=True)
                (folder / path.parent / "scores" / f"{task}-x.safetensors").touch()
        return True

    monkeypatch.setattr(queue, "look_inside", look_inside)
    monkeypatch.setattr(queue, "waits_for", lambda item, requests: "a choice" if item.provisional else "")
    monkeypatch.setattr(queue.gc, "collect", lambda: 0)
    monkeypatch.setattr(queue, "pack", lambda *_: None)
    return order


def test_processes_share_the_queue_by_names(tmp_path):
    all_names, muon = (
        {item.name for item in Queue(tmp_path / "runs", tmp_path / "evidence", names=names).pending(["batches"])}
        for names in ("*", "angpt-muon-*")
    )
    assert muon == {name for name in all_names if "muon" in name}
    assert muon
    stored(tmp_path / "runs" / "batches", "angpt-7M-x", 4.0)
    stored(tmp_path / "runs" / "batches", "angpt-muon-x", 4.0)
    pack(tmp_path / "runs", tmp_path / "a.tar", "angpt-muon-*")
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert {Path(name).parent.name for name in tar.getnames()} == {"angpt-muon-x"}


def test_the_queue_keeps_the_order_of_the_protocol_and_packs_what_ended(tmp_path, trained):
    q = Queue(tmp_path / "runs", tmp_path / "evidence")
    q.run(1e9, tmp_path / "a.tar", commit="abc")
    others = [stage for stage in queue.STAGES if stage not in queue.BY_DEFAULT]
    assert {item.stage for item in q.pending()} == set(others)
    q.run(1e9, tmp_path / "a.tar", stages=others)
    first = [name for name in trained if name.startswith("tuning/")]
    assert [name[-2:] for name in first[: 6 * TRIED]] == [f"{i:02d}" for i in range(TRIED) for _ in ARMS]
    stages = list(dict.fromkeys(name.partition("/")[0] for name in trained if "/" in name))
    assert stages == [*queue.STAGES]
    assert [n for n in trained if n.startswith("inside")][:6] == [
        f"inside {name}-320M-s1" for name in ("gpt+", "ngpt", "angpt", "gpt+-muon", "ngpt-muon", "angpt-muon")
    ]
    assert not list(q.pending())
    pack(tmp_path / "runs", tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar") as tar:
        tar.extractall(tmp_path / "evidence", filter="data")
    assert len(list((tmp_path / "evidence").glob("*/*/summary.json"))) == len(set(trained)) - 10 - 2
    assert Run(tmp_path / "evidence/final/gpt+-80M-s1").summary().environment["commit"] == "abc"
    elsewhere = Queue(tmp_path / "elsewhere", tmp_path / "evidence")
    assert not list(elsewhere.pending())
    for name, measured in (("results.json", 8), ("analysis.json", 12)):  # what lacks them must run again
        for file in (tmp_path / "evidence").glob(f"*/*/**/{name}"):
            file.unlink()  # made up; the pages need none
        assert len(list(elsewhere.pending())) == measured
    results = Results(tmp_path / "evidence")
    found = pages.marked(results)
    assert "not run yet" not in found["losses"] + found["primary"] + found["speed-ups"] + found["ablation"]
    every = [np.log([*results.losses(arm, budget).values()]) for budget in BUDGETS for arm in ARMS]
    freedom = 2 * len(every)  # no arm varies far more than the others
    deviation = math.sqrt(sum(((x - x.mean()) ** 2).sum() for x in every) / freedom)
    for budget in BUDGETS:
        one, two = ([*results.losses(arm, budget).values()] for arm in ("gpt+", "angpt"))
        line = next(x for x in found["primary"].splitlines() if x.startswith(f"| anGPT − GPT+ | {budget} "))
        difference, error = np.mean(two) - np.mean(one), deviation * math.hypot(np.mean(one), np.mean(two)) / 3**0.5
        half = stats.t.isf(0.025, freedom) * error
        shown = [f"{x:+.4f}".replace("-", "−") for x in (difference, difference - half, difference + half)]
        assert f"{shown[0]} [{shown[1]}, {shown[2]}]" in line
        assert tables.probability(2 * stats.t.sf(abs(difference) / error, freedom)) in line


def test_a_run_that_would_not_end_in_time_is_not_started(tmp_path, trained):
    q = Queue(tmp_path / "runs", tmp_path / "evidence", speed=Speed({}, 2e14))
    first = next(q.pending())
    needed = queue.MARGIN * q.seconds(first) + queue.RESERVE_SECONDS
    q.run(needed - 1, tmp_path / "a.tar", stages=["tuning"])
    assert not trained
    q.run(needed - 1, tmp_path / "a.tar", stages=["tuning", "batches"])  # what is shorter fills the gap
    assert {name.partition("/")[0] for name in trained} == {"batches"}
    q.run(needed + 5, tmp_path / "a.tar", stages=["tuning"], start=time.monotonic())
    assert "tuning/gpt+-adam-00" in trained


def test_estimates_follow_what_runs_took(tmp_path):
    q = Queue(tmp_path / "runs", tmp_path / "evidence", speed=Speed({}, 2e14))
    item = next(q.pending())
    before = q.seconds(item)
    q.walls += [(10.0, 12.0), (10.0, 30.0)]
    assert q.seconds(item) == pytest.approx(2.1 * before)  # the median
    q.walls += [(10.0, 13.0)]
    assert q.seconds(item) == pytest.approx(1.3 * before)  # one slow run does not count
    speed = Speed.measured()
    assert 35 < speed.seconds(item) < 45  # 35 to 51 s were measured
    big = next(i for i in q.pending() if i.name == "gpt+-640M-s1")
    assert 250 < speed.seconds(dataclasses.replace(big, analysed=False, evaluated=False)) < 300


def test_a_failure_costs_no_other_run(tmp_path, trained, monkeypatch, capsys):
    after = queue.bring_to_end

    def fails(job, reporter):
        if job.folder.name == "gpt+-adam-00":
            raise RuntimeError("out of memory")
        return after(job, reporter)

    monkeypatch.setattr(queue, "bring_to_end", fails)
    Queue(tmp_path / "runs", tmp_path / "evidence").run(1e9, tmp_path / "a.tar", stages=["tuning"])
    assert "tuning/gpt+-adam-00: failed: RuntimeError: out of memory" in capsys.readouterr().out
    assert len(trained) == 6 * TRIED - 1  # the edge rule waits for all of the first


def test_real_runs_of_a_tiny_model(tmp_path, monkeypatch):
    """Runs train, weights go, a run that is stopped goes on in the next call, every relative of Muon changes it."""
    tokens.make_up(tmp_path)
    monkeypatch.setattr(relatives, "SEEDS", (0,))
    adapt = rehearsal(tmp_path)
    q = Queue(tmp_path / "runs", tmp_path / "evidence", adapt, Speed({}, 1e12))
    q.run(1e9, tmp_path / "a.tar", stages=["relatives"])
    losses = {
        path.parent.name: Run(path.parent).summary().val_loss for path in tmp_path.glob("runs/relatives/*/s*.json")
    }
    firsts = {name: loss for name, loss in losses.items() if name.endswith("-s0")}
    assert set(firsts) == {relatives.folder_name(name, 0) for name in relatives.RELATIVES}
    assert len(set(firsts.values())) == len(firsts)
    assert not list(tmp_path.glob("runs/*/*/checkpoints"))
    ends = [Run(path.parent).summary() for path in tmp_path.glob("runs/relatives/*/summary.json")]
    assert {summary.checkpoint for summary in ends} == {None}  # not even written
    assert (relatives.muon.descend_, relatives.Optimizer.update) == (relatives.ORIGINAL[1], relatives.ORIGINAL[2])

    item = next(q.pending(["tuning"]))
    scored = tokens.make_up_requests(tmp_path / "requests")
    inside = dataclasses.replace(item, name="inside", analysed=True, evaluated=True, quantized=True)
    assert q.train(inside, 1e3).status == "finished"
    assert q.finish(inside, scored)
    folder = tmp_path / "runs" / "tuning" / "inside"
    assert Analysis.read(folder / "analysis.json").runs[0].norms is not None
    evaluated = {form: read_results(folder / form) for form in ("", "full", "int8", "fp8")}
    assert len({results.model.weights for results in evaluated.values()}) == 3  # full: those of the run
    losses = [results.losses[0].loss for results in evaluated.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(set(losses[1:])) == 3
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-2)
    assert not [path for form in ("full", "int8", "fp8") for path in (folder / form).glob("*.*")]  # weights go
    assert len(list(folder.glob("**/eval/scores/*"))) == 4 * len(paper.TASKS)
    assert Run(folder).summary().checkpoint is not None  # written for the analysis, and removed
    assert not (folder / "checkpoints").exists()

    long = dataclasses.replace(item.config, tokens=str(256 * 40_000), eval_every=40_000)
    longer = dataclasses.replace(item, build=lambda: long)
    stopped = q.train(longer, 1.0)
    assert stopped.status == "interrupted"
    assert 0 < stopped.step < 40_000
    assert list((tmp_path / "runs" / item.folder / "checkpoints").glob("step-*"))
    pack(tmp_path / "runs", tmp_path / "b.tar")
    with tarfile.open(tmp_path / "b.tar") as tar:
        names = tar.getnames()
        assert "tuning/inside/analysis.json" in names
        assert {"tuning/inside/eval/results.json", "tuning/inside/int8/eval/results.json"} <= set(names)
        assert not [name for name in names if name.startswith(str(item.folder))]
    again = q.train(longer, 1.0)
    assert again.step > stopped.step


def test_runs_that_are_scored_wait_for_requests(tmp_path):
    tuned(tmp_path / "evidence")
    tokens.make_up(tmp_path)
    q = Queue(tmp_path / "runs", tmp_path / "evidence", rehearsal(tmp_path), Speed({}, 1e12))
    item = next(item for item in q.pending(["final"]) if item.evaluated)
    assert queue.waits_for(item) == "--requests, since its weights are removed"
    assert queue.waits_for(item, tmp_path) == ""
    assert "(4 parts of the text)" in queue.waits_for(next(Queue(tmp_path, tmp_path / "evidence").pending(["final"])))


def test_weights_stay_if_what_needs_them_failed(tmp_path, monkeypatch, capsys):
    tokens.make_up(tmp_path)
    q = Queue(tmp_path / "runs", tmp_path / "evidence", rehearsal(tmp_path), Speed({}, 1e12))
    item = dataclasses.replace(next(q.pending(["tuning"])), analysed=True, evaluated=True, quantized=True)
    monkeypatch.setattr(inside, "score", lambda *_: 1 / 0)
    requests = tokens.make_up_requests(tmp_path / "requests")
    q.train(item, 1e3)
    assert not q.finish(item, requests)
    assert "eval/results.json: not measured: ZeroDivisionError" in capsys.readouterr().out
    analysis = tmp_path / "runs" / item.folder / "analysis.json"
    analysed = analysis.stat().st_mtime_ns
    assert list((tmp_path / "runs" / item.folder / "checkpoints").glob("step-*"))
    monkeypatch.setattr(Protocol, "items", lambda self: iter([item]))
    assert list(q.pending()) == [item]  # ended, but its weights wait
    monkeypatch.undo()
    (tmp_path / "runs" / item.folder / "int8").mkdir(
        exist_ok=True
    )  # of a process that was killed while it scored this form
    (tmp_path / "runs" / item.folder / "int8" / "folded.json").touch()
    assert q.finish(item, requests)
    assert not (tmp_path / "runs" / item.folder / "checkpoints").exists()
    assert analysis.stat().st_mtime_ns == analysed  # what is there is not measured again


def test_a_run_is_packed_before_it_is_looked_into(tmp_path, trained, monkeypatch):
    """Whatever happens during the analysis: what training has found is in the archive."""
    tuned(tmp_path / "evidence")
    q, packed = Queue(tmp_path / "runs", tmp_path / "evidence"), []
    item = next(item for item in q.pending(["final"]) if item.analysed)
    monkeypatch.setattr(Protocol, "items", lambda self: iter([item]))
    monkeypatch.setattr(queue, "pack", pack)

    def look_inside(item, folder, requests):
        with tarfile.open(tmp_path / "a.tar") as tar:
            packed.extend(tar.getnames())
        raise KeyboardInterrupt

    monkeypatch.setattr(queue, "look_inside", look_inside)
    with pytest.raises(KeyboardInterrupt):
        q.run(1e9, tmp_path / "a.tar", requests=tmp_path)
    assert {f"{item.folder}/{name}" for name in ("config.toml", "summary.json", "metrics.jsonl.gz")} <= set(packed)


def test_every_run_is_stopped_early_enough_for_its_analysis(tmp_path, trained, monkeypatch):
    tuned(tmp_path / "evidence")
    limits = {}
    q = Queue(tmp_path / "runs", tmp_path / "evidence")
    train = q.train
    monkeypatch.setattr(q, "train", lambda item, limit, commit: [limits.update({item: limit}), train(item, limit)][1])
    monkeypatch.setattr(queue.time, "monotonic", lambda: 5.0)
    q.run(1e6, tmp_path / "a.tar", stages=["final"], requests=tmp_path)
    assert len({queue.afterwards(item) for item in limits}) == 4  # nothing, analysis, tasks, tasks of four forms
    for item, limit in limits.items():
        assert limit == 1e6 - queue.RESERVE_SECONDS - queue.OVERHEAD_SECONDS - queue.afterwards(item)


@pytest.mark.parametrize("carry_over", [True, False])
def test_a_run_that_cannot_end_is_started_if_the_next_call_goes_on_with_it(tmp_path, trained, carry_over):
    q = Queue(tmp_path / "runs", tmp_path / "evidence", speed=Speed({}, 1e14))
    first = next(q.pending(["tuning"]))
    left = q.seconds(first) + queue.RESERVE_SECONDS - 1
    q.run(left, tmp_path / "a.tar", stages=["tuning"], carry_over=carry_over)
    assert trained[:1] == ([str(first.folder)] if carry_over else [])


def test_ctrl_c_ends_the_queue_and_the_limit_does_not(tmp_path, trained, monkeypatch):
    """An interrupted run is gone on with in the next call; the archive is written in any case."""
    q, packed, started = Queue(tmp_path / "runs", tmp_path / "evidence"), [], []
    monkeypatch.setattr(queue, "pack", lambda *_: packed.append(1))
    summary = stored(tmp_path / "other", "run", 3.0) or Run(tmp_path / "other" / "run").summary()

    def interrupted(job, reporter):
        started.append(job.folder.name)
        return dataclasses.replace(summary, status="interrupted", val_loss=None)

    monkeypatch.setattr(queue, "bring_to_end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        q.run(1e9, tmp_path / "a.tar", stages=["tuning"])
    assert len(started) == len(packed) == 1


@pytest.mark.parametrize("of_the_limit", [True, False])
def test_signals_outside_the_loop(of_the_limit):
    """The signal of the limit is for the loop of a run; another one ends the queue."""
    with contextlib.ExitStack() as stack:
        if not of_the_limit:
            stack.enter_context(pytest.raises(KeyboardInterrupt))
        with queue.stopped_after(0.0 if of_the_limit else 1e3) as over:
            assert over.wait(10.0 if of_the_limit else 0.0) == of_the_limit
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_commit_that_is_known_is_kept(tmp_path, trained, monkeypatch):
    q = Queue(tmp_path / "runs", tmp_path / "evidence")
    item, train = next(q.pending(["tuning"])), queue.bring_to_end

    def with_commit(job, reporter):
        train(job, reporter)
        run = Run(job.folder)
        run.write_summary(dataclasses.replace(run.summary(), environment={"commit": "of git"}))
        return run.summary()

    monkeypatch.setattr(queue, "bring_to_end", with_commit)
    q.train(item, 1e3, "by hand")
    assert Run(tmp_path / "runs" / item.folder).summary().environment["commit"] == "of git"


def test_archives_have_what_evidence_lacks(tmp_path):
    """A run whose analysis came later is packed again."""
    for root in ("runs", "evidence"):
        stored(tmp_path / root / "final", "angpt-320M-s1", 3.0)

    def names():
        pack(tmp_path / "runs", tmp_path / "a.tar", evidence=tmp_path / "evidence")
        with tarfile.open(tmp_path / "a.tar") as tar:
            return tar.getnames()

    assert names() == []
    scores = tmp_path / "runs/final/angpt-320M-s1/eval/scores/piqa.json"  # not kept in evidence
    scores.parent.mkdir(parents=True)
    scores.write_text("{}")
    assert names() == []
    (tmp_path / "runs/final/angpt-320M-s1/analysis.json").write_text("{}")
    assert {"final/angpt-320M-s1/analysis.json", "final/angpt-320M-s1/eval/scores/piqa.json"} <= set(names())


def test_records_that_were_not_compressed_before_a_kill_are_packed(tmp_path):
    stored(tmp_path / "runs/final", "angpt-320M-s1", 3.0)
    folder = tmp_path / "runs/final/angpt-320M-s1"
    (folder / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    pack(tmp_path / "runs", tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert "final/angpt-320M-s1/metrics.jsonl.gz" in tar.getnames()
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_a_leftover_checkpoint_does_not_make_a_run_start_again(tmp_path):
    q = Queue(tmp_path / "runs", tmp_path / "evidence")
    item = next(q.pending(["tuning"]))
    stored(tmp_path / "evidence" / item.stage, item.name, 3.0)
    (tmp_path / "runs" / item.folder / "checkpoints/step-5").mkdir(parents=True)
    assert item.folder not in {i.folder for i in q.pending(["tuning"])}


def test_a_missing_task_is_found_at_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokens.make_up_requests(tmp_path / "requests")
    (tmp_path / "requests" / "wikitext.safetensors").unlink()
    with pytest.raises(UserError, match=r"requests/\w+\.safetensors"):
        main(["run", "--requests", str(tmp_path / "requests"), "--seconds", "9", "--archive", str(tmp_path / "a.tar")])


def test_an_unknown_stage_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--stages", "finals"])
    assert "unknown finals; there are tuning final" in capsys.readouterr().err


def test_the_command_for_metrics_names_the_runs_that_are_scored(tmp_path):
    tuned(tmp_path)
    assert "{gpt+,angpt}{,-muon}-{320,640}M-s1 {gpt+,angpt}-320M-s1/{full,fp8,int8}" in PROTOCOL
    items = list(Protocol((tmp_path,)).final())
    named = {f"{a}{m}-{b}M-s1" for a in ("gpt+", "angpt") for m in ("", "-muon") for b in (320, 640)}
    assert {item.name for item in items if item.evaluated} == named
    assert {item.name for item in items if item.quantized} == {"gpt+-320M-s1", "angpt-320M-s1"}
    assert set(inside.FORMS) == {"full", "fp8", "int8"}


def test_thinned_metrics():
    lines = [{"kind": "train", "step": s, "loss": 1.0} for s in range(1, 26)] + [{"kind": "val", "step": 25}]
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    kept = [json.loads(line) for line in gzip.decompress(thinned(text)).splitlines()]
    assert [line["step"] for line in kept] == [1, 10, 20, 25, 25]
    assert thinned(text) == thinned(text)


def test_the_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["plan", "--runs", str(tmp_path / "runs"), "--stages", "final"])
    out = capsys.readouterr().out
    pending = [item.name for item in Queue(tmp_path / "runs").pending(["final"])]
    assert re.findall(r"\| final/(\S+) \|", out) == pending
    assert f"left in all: {len(pending)} run" in out
    main(["run", "--runs", str(tmp_path / "runs"), "--seconds", "1", "--archive", str(tmp_path / "a.tar")])
    assert (tmp_path / "a.tar").exists()


def test_a_model_is_measured_when_every_task_is_scored(tmp_path):
    """The loss is written first, so that a process that is killed between two tasks leaves a file of results."""
    file = tmp_path / inside.RESULTS
    assert not inside.is_measured(file)
    model = Evaluated("x", "run", "0" * 64, 32, 61, None)
    write_results(tmp_path, Evaluation(model, (), ()))
    assert not inside.is_measured(file)
    (tmp_path / inside.SCORES).mkdir()
    for count, task in enumerate(paper.TASKS, start=1):
        (tmp_path / inside.SCORES / f"{task}-a-b.safetensors").touch()
        assert inside.is_measured(file) == (count == len(paper.TASKS))


def test_what_must_be_measured_again_comes_last_and_keeps_its_loss(tmp_path):
    tuned(tmp_path / "evidence")
    q = Queue(tmp_path / "runs", tmp_path / "evidence")
    item = next(item for item in q.pending(["final"]) if item.analysed)
    write(tmp_path / "evidence" / item.folder, item.config, loss=3.0)  # ended, but its analysis is missing
    assert [i.folder for i in q.pending(["final"])][-1] == item.folder
    write(tmp_path / "runs" / item.folder, item.config, loss=4.0)
    (tmp_path / "runs" / item.folder / "analysis.json").write_text("{}")
    pack(tmp_path / "runs", tmp_path / "a.tar", evidence=tmp_path / "evidence")
    with tarfile.open(tmp_path / "a.tar") as tar:
        names = {Path(name).name for name in tar.getnames()}
    assert "analysis.json" in names
    assert not names & {"config.toml", "summary.json"}
