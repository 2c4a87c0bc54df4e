"""The protocol of docs/evidence.md as code: its trials and rules, the text, and the pages."""

import dataclasses
import itertools
import json
import lzma
import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from angpt.config import DataConfig, PrepareConfig, TrainConfig
from angpt.data.prepare import prepare
from angpt.data.shards import TokenData
from angpt.fits.hparams import HparamFit, SizeFit, fit_sweep
from angpt.present.words import bracketed
from angpt.serialization import read_toml
from angpt.stats import Interval
from angpt.studies.jobs import ended
from angpt.training.plan import make_plan
from angpt.training.run import Run, Summary
from experiments.evidence import pages, paper, sweeps, tables, tokens
from experiments.evidence.protocol import BUDGETS, DATA, EVIDENCE, SEEDS, Protocol
from experiments.evidence.results import Results
from experiments.evidence.trials import ADDED, ARMS, TRIED, arm_name, make_trials, space_of

PROTOCOL = (EVIDENCE.parent / "evidence.md").read_text(encoding="utf-8")


# The folders of docs/evidence


def test_the_tables_of_the_pages_follow_from_the_run_folders():
    found = pages.marked(Results())
    for page in pages.PAGES:
        text = page.read_text(encoding="utf-8")
        assert pages.filled(text, found) == text, f"{page.name}: run `python -m experiments.evidence pages`"
        unknown = re.sub(r"(?<= )\d+|not run yet", "?", text)
        assert pages.filled(unknown, found) != unknown
    report = pages.PAGES[1].read_text(encoding="utf-8")
    assert all(f"<!-- {name} -->" in "".join(p.read_text(encoding="utf-8") for p in pages.PAGES) for name in found)
    assert report.count("<!-- end -->") == report.count("<!-- ") - report.count("<!-- end -->")


def test_a_batch_of_which_all_runs_diverged_is_told(monkeypatch):
    good, lost = fit_sweep(1024, [(1, 3.0), (2, 2.9), (4, 3.0)], []), fit_sweep(2048, [], [1, 2])
    sizes = tuple(SizeFit("angpt", 7e6, 2e7, tried, None, "", ()) for tried in ((good, lost), (lost, lost)))
    monkeypatch.setattr(sweeps, "fitted", lambda: HparamFit((), (), sizes))
    assert [row[-2:] for row in sweeps.batches().rows] == [("**2.900**", "diverged"), ("", "diverged")]


def test_every_stored_run_is_one_that_the_protocol_calls_for():
    """With the settings that it was trained with; the machine may differ."""
    items = {item.folder: item for item in Protocol().items()}
    stored = [path.parent for path in EVIDENCE.glob("*/*/config.toml")]
    assert len(stored) >= 110
    for folder in stored:
        item = items[folder.relative_to(EVIDENCE)]
        precision = "bf16" if item.config.precision == "auto" else item.config.precision
        device = dataclasses.replace(item.config, device="cpu", precision=precision, compile="on")
        known = dataclasses.replace(read_toml(TrainConfig, folder / "config.toml"), device="cpu")
        ours, theirs = make_plan(device).config, make_plan(known).config
        same = {"micro_batch": theirs.micro_batch, "eval_every": theirs.eval_every}
        same |= {"checkpoint_every": theirs.checkpoint_every}
        assert dataclasses.replace(ours, **same, model=ours.model.resolved()) == dataclasses.replace(
            theirs, model=theirs.model.resolved()
        ), folder


def test_the_trials_are_those_of_the_sequence():
    points = json.loads((EVIDENCE / "trials.json").read_text(encoding="utf-8"))
    assert points == make_trials()
    assert list(points) == [f"{arm_name(a)}-{i:02d}" for i in range(TRIED + ADDED) for a in ARMS]


def test_the_protocol_says_what_the_code_does():
    for text in (f"{TRIED} trials per arm", "seeds 1, 2 and 3", "12 tests", "within 0.01 nats"):
        assert text in PROTOCOL, text
    for budget in BUDGETS:
        assert budget in PROTOCOL


# The rules, on made-up losses


def summary(config, loss, status="finished", seconds=None):
    plan = make_plan(dataclasses.replace(config, device="cpu"))
    used = seconds or plan.steps * plan.batch_tokens / 2e6
    return Summary(status, plan.steps, plan.steps, plan.steps * plan.batch_tokens, loss, used, 1.0, 2e6, 8.0,
                   plan.parameters, plan.flops_per_token, None, {})  # fmt: skip


def made_up(config: TrainConfig) -> float:
    """A loss that falls with tokens and has its minimum at a learning rate; anGPT is better, seeds vary."""
    plan = make_plan(dataclasses.replace(config, device="cpu"))
    o = plan.config.optimizer
    best = {"gpt+": 0.005, "ngpt": 0.012, "angpt": 0.01}[config.model.architecture.partition("/")[0]]
    best = 0.03 if o.name == "muon" else best
    base = {"gpt+": 3.7, "ngpt": 3.66, "angpt": 3.6}[config.model.architecture.partition("/")[0]]
    tokens = int(plan.config.tokens)
    extra = 0.05 * ("/" in config.model.architecture) - 0.1 * (o.name == "muon")
    wiggle = 0.004 * math.sin(7 * config.seed + len(config.recipe))
    return base * (tokens / 80e6) ** -0.05 + 0.05 * math.log2(o.lr / best) ** 2 + extra + wiggle


def write(folder: Path, config: TrainConfig, loss: float | None = None, status="finished", seconds=None) -> None:
    run = Run.create(folder, make_plan(dataclasses.replace(config, device="cpu")).config)
    run.write_summary(summary(config, made_up(config) if loss is None else loss, status, seconds))


def tuned(root: Path, losses=lambda name, config: made_up(config), extended=True) -> None:
    """Write the trials that the protocol calls for."""
    for _ in range(2):
        for item in Protocol((root,)).tuning():
            if not item.provisional and ended(root / item.folder) is None:
                loss = losses(item.name, item.config)
                write(root / item.folder, item.config, None if loss == math.inf else loss,
                      "diverged" if loss == math.inf else "finished")  # fmt: skip


def test_the_best_trial_is_chosen_and_divergence_counts(tmp_path):
    """The loss of a trial is the place of its rate in the middle of all: no edge, no further trials."""

    def loss(name, config):
        return math.inf if name == "angpt-adam-04" else 4.0 - 0.5 * (name[-2:] in ("01", "04")) - 0.001 * int(name[-2:])

    tuned(tmp_path, loss)
    protocol = Protocol((tmp_path,))
    assert protocol.tuned
    assert {protocol.chosen(arm).name[-2:] for arm in ARMS} == {"01", "04"}
    assert protocol.chosen("angpt").name == "angpt-adam-01"
    assert protocol.chosen("gpt+").name == "gpt+-adam-04"


def test_a_trial_that_is_missing_leaves_the_choice_open(tmp_path):
    tuned(tmp_path)
    assert Protocol((tmp_path,)).tuned
    (tmp_path / "tuning" / "ngpt-muon-07" / "summary.json").unlink()
    protocol = Protocol((tmp_path,))
    assert not protocol.tuned
    assert all(item.provisional for item in itertools.chain(protocol.final(), protocol.ablation()))


@pytest.mark.parametrize("side", [-1, 0, 1])
@pytest.mark.parametrize("key", ["optimizer.lr", "optimizer.adam_lr", "optimizer.weight_decay", "optimizer.warmup"])
def test_the_edge_rule_adds_trials_to_every_arm_and_moves_a_setting_of_one(tmp_path, monkeypatch, key, side):
    """In the best trial, number 5, all settings but one are in the middle of those of its arm."""
    arm, points = "gpt+:muon", json.loads((EVIDENCE / "trials.json").read_text(encoding="utf-8"))
    for other in ARMS:
        own = [points[f"{arm_name(other)}-{i:02d}"] for i in range(TRIED)]
        for setting in space_of(other):
            values = sorted(trial[setting] for trial in own)
            place = TRIED // 2 if (other, setting) != (arm, key) or side == 0 else 1 if side < 0 else TRIED - 2
            holder = next(trial for trial in own if trial[setting] == values[place])
            holder[setting], own[5][setting] = own[5][setting], holder[setting]
    best = f"{arm_name(arm)}-05"
    monkeypatch.setattr(Protocol, "points", points)
    tuned(tmp_path, lambda name, config: 3.0 if name.endswith("-05") else 4.0)
    protocol = Protocol((tmp_path,))
    assert protocol.edges(arm) == ({key: side} if side else {})
    assert not any(protocol.edges(other) for other in ARMS if other != arm)
    assert protocol.extended is bool(side)
    low, high = space_of(arm)[key]
    for other in ARMS:
        trials = protocol.trials(other, protocol.extended)
        assert len(trials) == (TRIED + ADDED if side else TRIED)
        for trial in trials[TRIED:]:
            expected = dict(points[trial.name])
            if other == arm:  # log-uniform from half of to twice the best value, where it was log-uniform in its range
                place = math.log(expected[key] / low) / math.log(high / low)
                expected[key] = pytest.approx(min(1.0, points[best][key] / 2 * 4**place), rel=6e-3)
            assert trial.settings == expected


def test_final_runs_have_the_chosen_settings_fresh_seeds_and_all_of_the_text(tmp_path):
    tuned(tmp_path)
    protocol = Protocol((tmp_path,))
    items = list(protocol.final())
    assert len(items) == 6 * 3 * 3 + 4
    assert [float(item.config.tokens[:-1]) for item in items] == sorted(float(i.config.tokens[:-1]) for i in items)
    for item in items:
        chosen = protocol.chosen(item.config.recipe).settings
        o = item.config.optimizer
        assert (o.lr, o.beta2) == (chosen["optimizer.lr"], chosen["optimizer.beta2"])
        assert (o.adam_lr, o.weight_decay) == tuple(chosen.get(f"optimizer.{k}") for k in ("adam_lr", "weight_decay"))
        assert item.config.model.stored_scale == chosen.get("model.stored_scale")
        assert item.config.seed in (1, 2, 3)
        assert item.config.data == DataConfig("data/all")
        assert not item.provisional


def stored(folder, name, loss):
    """A run that has ended, as far as the protocol looks at it."""
    (folder / name).mkdir(parents=True)
    run = Summary("finished", 1, 1, 1, loss, 1.0, 0.0, 1.0, 0.0, 1, 1, None, {})
    Run(folder / name).write_summary(run)


def test_grids_of_batches_grow_by_the_losses_of_all_sweeps(tmp_path):
    def asked():
        return {item.name for item in Protocol((tmp_path,)).files() if item.name.startswith("angpt-7M-80M-")}

    def of(batch, *rates):
        return {f"angpt-7M-80M-b{batch}-lr{rate}-s0" for rate in rates}

    first = of(32768, 0.008, 0.016, 0.032) | of(65536, 0.008, 0.016, 0.032, 0.064)
    assert asked() == first
    for name in first:  # the rate of 0.064 is that of transfer-80M.toml alone
        rate, large = float(re.search(r"lr([\d.]+)", name)[1]), "b65536" in name
        stored(tmp_path / "transfer", name, 4.5 + (0.1 if rate != 0.016 else 0.0) - (0.2 if large else 0.0))
    batches = [item for item in Protocol((tmp_path,)).files() if item.stage == "batches" and "7M-80M" in item.name]
    found = {item.name for item in batches if item.config.optimizer.name == "adam"}
    assert found == of(131072, 0.008, 0.016, 0.032)  # larger than the best; what transfer has is not repeated


# The text


def test_parts_that_travel_alone_are_the_same_tokens_as_all_together(tmp_path):
    words = [
        "the",
        "of",
        "and",
        "to",
        "in",
        "a",
        "is",
        "that",
        "for",
        "it",
        "as",
        "was",
        "with",
        "be",
        "by",
        "on",
        "not",
        "he",
    ]
    random = np.random.Generator(np.random.PCG64(1))
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, count in zip((*tokens.PARTS, tokens.VAL), (30, 20, 25, 10, 5), strict=True):
        lines = [json.dumps({"text": " ".join(random.choice(words, size=40))}) + "\n" for _ in range(count)]
        (corpus / name).write_bytes(lzma.compress("".join(lines).encode()))
    files = [str(corpus / name) for name in (*tokens.PARTS, tokens.VAL)]
    prepare(tuple(files), tmp_path / "whole", PrepareConfig(tokenizer="bpe:300"))
    (corpus / tokens.VOCABULARY).write_bytes((tmp_path / "whole" / "tokenizer.json").read_bytes())
    tokens.pack(corpus, tmp_path / "here", tmp_path / "carried", (1, 2, 3, 4))
    for number in (1, 2, 3, 4):  # one arrives with each call
        arrived = tmp_path / f"call-{number}"
        arrived.mkdir()
        tokens.archive_of(tmp_path / "carried", number).rename(tokens.archive_of(arrived, number))
        tokens.arrange(arrived, tmp_path / "there")
        assert {name for name in DATA if (tmp_path / "there" / name).exists()} == {
            name for name, count in DATA.items() if count <= number
        }
    for split in ("train", "val"):
        one, two = (TokenData.open(path, split) for path in (tmp_path / "whole", tmp_path / "there/data/all"))
        assert np.array_equal(one.read(0, one.tokens), two.read(0, two.tokens))
    prepare((*files[:2], files[-1]), tmp_path / "two", PrepareConfig(tokenizer=str(corpus / tokens.VOCABULARY)))
    one, two = (TokenData.open(path, "train") for path in (tmp_path / "two", tmp_path / "there/data/tuning"))
    assert np.array_equal(one.read(0, one.tokens), two.read(0, two.tokens))


# Verdicts and small sums


@pytest.mark.parametrize(
    ("ours", "theirs", "none", "verdict"),
    [
        (None, 1.4, 1.0, paper.NOT_RUN),
        (Interval(1.3, 1.2, 1.4), 1.4, 1.0, paper.HOLDS),
        (Interval(1.1, 1.05, 1.15), 1.4, 1.0, paper.WEAK),
        (Interval(1.3, 0.9, 1.7), 1.4, 1.0, paper.OPEN),
        (Interval(0.9, 0.85, 0.95), 1.4, 1.0, paper.FAILS),
        (Interval(1.3), 1.4, 1.0, paper.OPEN),
        (Interval(-0.02, -0.03, -0.01), -0.03, 0.0, paper.HOLDS),
        (Interval(0.02, 0.01, 0.03), -0.03, 0.0, paper.FAILS),
    ],
)
def test_verdicts(ours, theirs, none, verdict):
    assert paper.judged(ours, theirs, none) == verdict


def test_an_arm_of_which_a_seed_diverged_has_no_mean_and_no_speed_up(tmp_path):
    tuned(tmp_path)
    for item in Protocol((tmp_path,)).final():
        diverged = item.name == "angpt-160M-s2"
        write(tmp_path / item.folder, item.config, status="diverged" if diverged else "finished")
    results = Results(tmp_path)
    assert results.diverged("angpt", "160M")
    assert results.row("angpt", "160M", results.with_adam) is None
    assert results.row("angpt", "80M", results.with_adam) is not None
    text = [row for row in tables.tests(results, results.primary, adjusted=True).rows if row[1] == "160M"]
    assert [row[-1] for row in text[:2]] == ["anGPT diverged"] * 2
    assert ("anGPT", "160M", "diverged", "", "") in tables.speed_ups(results).rows


def test_verdicts_on_no_effect():
    assert paper.change_judged(Interval(0.001, -0.004, 0.006), 0.0) == paper.HOLDS
    assert paper.change_judged(Interval(0.001, -0.02, 0.022), 0.0) == paper.OPEN
    assert paper.change_judged(Interval(0.05, 0.04, 0.06), 0.0) == paper.FAILS


def test_the_expected_best_of_several_trials():
    values = [3.1, 3.9, 3.4, 3.2, 5.0]
    for n in range(1, 6):
        every = [min(chosen) for chosen in itertools.combinations(values, n)]
        assert tables.expected_best(values, n) == pytest.approx(np.mean(every))


def test_rules_state_the_intervals_of_the_fitted_exponents():
    text = (EVIDENCE.parents[1] / "angpt" / "training" / "rules.toml").read_text(encoding="utf-8")
    laws = [law for trend in sweeps.fitted().trends for law in (trend.lr, trend.batch_tokens) if law is not None]
    assert len(laws) == 4
    for law in laws:
        for name, exponent in law.law.exponents.items():
            assert "[" + bracketed(exponent, ".2f").partition("[")[2] in text, name


def test_the_power_of_the_primary_tests_is_as_stated():
    """The strictest of twelve tests at 0.01, with the deviation pooled over six arms at three budgets."""
    freedom, error = 6 * 3 * (len(SEEDS) - 1), math.sqrt(2 / len(SEEDS))
    limit = stats.t.isf(0.01 / 12 / 2, freedom)
    text = (EVIDENCE.parent / "evidence.md").read_text(encoding="utf-8")
    needed, found = map(
        float, re.findall(r"asks for a difference of (\d+\.\d+) .*?finds a true one of (\d+\.\d+)", text, re.DOTALL)[0]
    )
    assert f"{freedom} degrees of freedom" in text
    assert needed == pytest.approx(limit * error, abs=0.05)
    assert stats.nct.sf(limit, freedom, found / error) == pytest.approx(0.9, abs=0.01)
