import dataclasses
import re

import pytest

from angpt.errors import UserError
from angpt.serialization import read_toml
from angpt.studies.config import StudyConfig
from angpt.studies.grid import Group, Point, budget_name, groups, largest_lines, run_config, short, start_lines
from angpt.studies.study import Study
from angpt.training.plan import count, make_plan, rule_for
from tests.studies.conftest import ROOT, STUDY, write_study


@pytest.fixture
def read(tmp_path):
    def read(*changes, text=STUDY):
        return read_toml(StudyConfig, write_study(tmp_path / "s.toml", "data/x", *changes, text=text))

    return read


def names(config, tmp_path):
    return [job.folder.name for job in Study(tmp_path, config).jobs()]


def test_every_combination_is_a_run_with_a_name_of_its_own(read, tmp_path):
    found = names(read(), tmp_path)
    expected = {
        f"{a}-{s}-2.048k-b{b}-lr{r}-s0"
        for a in ("gpt+", "angpt")
        for s in "ab"
        for b in (128, 256)
        for r in ("0.004", "0.016", "0.064")
    }
    assert set(found) == expected
    assert len(found) == 24


def test_names_do_not_depend_on_the_rest_of_the_study(read, tmp_path):
    before = set(names(read(), tmp_path))
    grown = read(('sizes = ["a", "b"]', 'sizes = ["b", "32M", "a"]'), ("lrs = [0.004,", "lrs = [0.1, 0.004,"))
    assert before < set(names(grown, tmp_path))


def test_a_run_that_stands_in_two_grids_is_done_once(read, tmp_path):
    text = STUDY.replace(
        "[shapes.a]", '[[grid]]\nsizes = ["a"]\nbudgets = ["2k", "2048"]\nbatches = [128]\nlrs = [0.016]\n\n[shapes.a]'
    )
    found = names(read(text=text), tmp_path)
    assert len(found) == len(set(found))
    assert set(found) - set(names(read(), tmp_path)) == {
        "gpt+-a-2k-b128-lr0.016-s0", "angpt-a-2k-b128-lr0.016-s0",
        "ngpt-a-2k-b128-lr0.016-s0", "ngpt-a-2.048k-b128-lr0.016-s0",
    }  # fmt: skip


def test_settings_of_a_run(read):
    config = read(('budgets = ["2048"]', 'budgets = ["3x"]'))
    point = Point(Group("angpt", "b", "3x"), 256, 0.016, 5)
    run = run_config(config, point)
    baseline, _ = count(dataclasses.replace(run.model, architecture="gpt+"))
    own, _ = count(run.model)
    assert own != baseline
    assert (run.model.d_model, run.model.architecture, run.model.context) == (32, "angpt", 32)
    assert (run.tokens, run.batch_tokens, run.optimizer.lr, run.seed) == (str(3 * baseline), 256, 0.016, 5)
    assert make_plan(run).config.optimizer.warmup == 0  # by the rule of the architecture


def test_sizes_of_the_paper(read):
    config = read(('sizes = ["a", "b"]', 'sizes = ["0.5B"]'))
    model = run_config(config, Point(Group("gpt+", "0.5B", "20x"), 128, 0.01, 0)).model
    assert (model.d_model, model.n_layers, model.n_heads) == (1024, 24, 16)


def test_beta2_of_small_models(read):
    changes = ('baseline = "gpt+"', 'baseline = "gpt+"\nbeta2_below_100M = 0.99'), ("vocab_size = 61", "")
    config = read(*changes)
    beta2 = {
        size: run_config(config, Point(Group("gpt+", size, "20x"), 128, 0.01, 0)).optimizer.beta2
        for size in ("a", "32M", "62M", "125M", "1B")
    }
    assert beta2 == {"a": 0.99, "32M": 0.99, "62M": 0.99, "125M": 0.95, "1B": 0.95}
    plain = run_config(read(), Point(Group("gpt+", "a", "20x"), 128, 0.01, 0))
    assert plain.optimizer.beta2 == 0.95


@pytest.mark.parametrize("architecture", ["gpt+", "ngpt", "angpt/no-lerp", "angpt/no-lerp:muon"])
def test_multiples_are_of_the_rule(read, architecture):
    config = read(
        ('["gpt+", "angpt"]', f'["gpt+", "{architecture}"]' if architecture != "gpt+" else '["gpt+"]'),
        ("batches = [128, 256]", 'batches = ["0.5x", "2x", 4096]'),
        ("lrs = [0.004, 0.016, 0.064]", 'lrs = ["0.5x", "1x", 1]'),
        ("context = 32", "context = 2048"),
        ('sizes = ["a", "b"]', 'sizes = ["125M"]'),
    )
    group = Group(architecture, "125M", "2.048k")
    model = run_config(config, Point(group, 128, 1.0, 0)).model
    rule, (parameters, _) = rule_for(architecture), count(model)
    batch = rule.batch_at(parameters, 2048, 2048)
    lines = start_lines(config.grid[0], group, config)
    assert list(lines) == sorted([4096, batch // 2, 2 * batch])
    for tokens, rates in lines.items():
        lr = rule.lr_at(parameters, 2048, tokens)
        assert rates == pytest.approx(sorted([lr / 2, lr, 1.0]), rel=0.005)


def test_multiples_are_of_the_rates_of_the_study_where_it_has_some(read):
    config = read(
        ("lrs = [0.004, 0.016, 0.064]", 'lrs = ["0.5x", "1x", 1]'), ("threads = 1", "lrs = {angpt = 0.0123456}")
    )
    assert start_lines(config.grid[0], Group("angpt", "a", "2.048k"), config)[128] == [0.00617, 0.0123456, 1.0]
    assert start_lines(config.grid[0], Group("gpt+", "a", "2.048k"), config)[128][1] != 0.0123456


@pytest.mark.parametrize("given", [None, 0.005])
def test_lrs_are_of_muon_and_the_rate_of_adam_beside_it_is_by_the_rule(read, given):
    """Also in trials and in the runs that take their rate."""
    changes = [("lrs = [0.004, 0.016, 0.064]", 'lrs = ["2x"]'), ('"angpt"]', '"angpt:muon"]')]
    if given:
        changes.append(("[train]", f"[train]\noptimizer = {{adam_lr = {given}}}"))
    config = read(*changes, ("threads = 1", 'lrs = {"angpt:muon" = 0.01}'))
    for budget, tokens in (("2.048k", 2048), ("1M", 10**6)):
        group = Group("angpt:muon", "a", budget)
        assert start_lines(config.grid[0], group, config)[128] == [0.02]
        for trial in (False, True):
            run = make_plan(run_config(config, Point(group, 128, 0.02, 0, trial))).config.optimizer
            assert (run.name, run.lr) == ("muon", 0.02)
            assert run.adam_lr == (given or rule_for("angpt:muon").adam_lr_at(tokens))
    assert rule_for("angpt:muon").adam_lr_at(2048) > rule_for("angpt:muon").adam_lr_at(10**6)
    assert make_plan(run_config(config, Point(Group("gpt+", "a", "1M"), 128, 0.02, 0))).config.optimizer.adam_lr is None


def test_an_architecture_has_settings_of_its_own(read):
    own = """
    [settings."gpt+".optimizer]
    weight_decay = 0.7
    [settings."angpt:muon"]
    eval_every = 3
    optimizer = {adam_lr = 0.02, momentum = 0.9}
    [train]"""
    config = read(('"angpt"]', '"angpt:muon", "angpt"]'), ("[train]", own))
    found = {a: run_config(config, Point(Group(a, "a", "1M"), 128, 0.02, 0)) for a in ("gpt+", "angpt:muon", "angpt")}
    assert found["gpt+"].optimizer.weight_decay == 0.7
    assert (found["angpt:muon"].eval_every, found["angpt:muon"].optimizer.adam_lr) == (3, 0.02)
    assert found["angpt"] == run_config(read(), Point(Group("angpt", "a", "1M"), 128, 0.02, 0))
    assert {run.data for run in found.values()} == {config.train.data}


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ('"gpt+".optimizer.lr = 0.1', "settings.gpt[+].optimizer.lr: runs of a study differ in it; say lrs in"),
        ('"gpt+".seed = 1', "settings.gpt[+].seed: runs of a study differ in it; say seeds in"),
        ('"gpt+".tokens = "1M"', "settings.gpt[+].tokens: runs of a study differ in it; say budgets in"),
        ('"gpt+".optimizer.weight = 0.1', "unknown key 'settings.gpt[+].optimizer.weight'"),
        ('"gpt+".optimizer = 3', "settings.gpt[+].optimizer must be"),
        ("ngpt.seed = 1", "settings: ngpt is not among the architectures"),
    ],
)
def test_wrong_settings_of_an_architecture_are_refused(read, own, words):
    with pytest.raises(UserError, match=words):
        read(("[train]", f"[settings]\n{own}\n[train]"))


def test_without_sizes_and_budgets_those_of_train_hold(read, tmp_path):
    config = read(
        ('sizes = ["a", "b"]\n', ""),
        ('budgets = ["2048"]\n', ""),
        ("[train]", '[train]\ntokens = "5e3"'),
        ("vocab_size = 61", "vocab_size = 61\nd_model = 48\nn_heads = 3\nn_layers = 1"),
    )
    assert next(groups(config.grid[0], config.train)) == Group("gpt+", "", "5k")
    assert "angpt-5k-b256-lr0.064-s0" in names(config, tmp_path)


BUDGETS = {"2e9": "2B", "2000M": "2B", "20x": "20x", "0.50x": "0.5x", "1234567": "1.234567M", "999": "999"}


@pytest.mark.parametrize(("text", "expected"), BUDGETS.items())
def test_names_of_budgets(text, expected):
    assert budget_name(text) == expected


def test_short_names_keep_every_digit():
    for tokens in (1, 999, 1000, 1500, 1_234_567, 640_988_160, 10**9 + 1):
        unit = {"B": 1e9, "M": 1e6, "k": 1e3}.get(short(tokens)[-1])
        assert round(float(short(tokens)[:-1]) * unit if unit else float(short(tokens))) == tokens


def test_the_largest_grid(read):
    config = read(
        ("lrs = [0.004, 0.016, 0.064]", "lrs = [0.004, 0.016]\nlr_limits = [0.001, 0.3]\nbatch_limits = [64, 512]")
    )
    start = start_lines(config.grid[0], Group("gpt+", "a", "2.048k"), config)
    lines = largest_lines(start, config.grid[0])
    assert list(lines) == [64, 128, 256, 512]
    assert lines[64] == pytest.approx([0.001, 0.004, 0.016, 0.064, 0.256])
    lines = largest_lines({128: [0.004, 0.016], 256: [0.008, 0.032]}, config.grid[0])  # rates that follow the batch
    assert lines[64] == lines[128] == pytest.approx([0.001, 0.004, 0.016, 0.064, 0.256])
    assert lines[512] == lines[256] == pytest.approx([0.002, 0.008, 0.032, 0.128])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[[grid]]", "[grid]", "grid must be a list of tables, each under [[grid]]"),
        ("architectures =", "architecture =", "unknown key 'grid[0].architecture': did you mean architectures"),
        ('["gpt+", "angpt"]', '["gpt+", "gpt+"]', "grid.architectures = gpt+, gpt+ names one twice"),
        ('["gpt+", "angpt"]', "[]", "grid.architectures: name at least one"),
        ('sizes = ["a", "b"]', 'sizes = ["c"]', "grid.sizes: unknown size 'c'"),
        ('sizes = ["a", "b"]', 'sizes = ["33M"]', "did you mean 32M"),
        ('budgets = ["2048"]', "budgets = [2048]", "grid[0].budgets[0] must be a string, not 2048"),
        ('budgets = ["2048"]', 'budgets = ["many"]', "'many' is not a budget"),
        ("lrs = [0.004, 0.016, 0.064]", 'lrs = ["fast"]', "grid.lrs: 'fast' is neither a number nor a multiple"),
        ("lrs = [0.004, 0.016, 0.064]", "lrs = [-1]", "grid.lrs: -1.0 must be positive"),
        ("lrs = [0.004, 0.016, 0.064]", "lrs = [nan]", "grid.lrs: nan must be positive and finite"),
        ("lrs = [0.004, 0.016, 0.064]", "lrs = [0.1]\nlr_limits = [0.01, 1]", "it must have two values at least"),
        ("[shapes.a]", "lr_limits = [1, 0.1]\n[shapes.a]", "grid.lr_limits = [1.0, 0.1]: give the lowest"),
        ("[shapes.a]", "batch_limits = [1]\n[shapes.a]", "grid.batch_limits = [1]: give the lowest and the highest"),
        ('baseline = "gpt+"', 'baseline = "gtp+"', "baseline = 'gtp+' is not in a grid: did you mean gpt+"),
        ('baseline = "gpt+"', "beta2_below_100M = 1", "beta2_below_100M must be in [0, 1)"),
        ('baseline = "gpt+"', "tuning_split = 1", "tuning_split must be in (0, 1), not 1.0"),
        ('baseline = "gpt+"', "lrs = {ngpt = 0.1}", "lrs: ngpt is not among the architectures"),
        ('baseline = "gpt+"', "lrs = {angpt = 0}", "lrs: the rate of angpt must be positive"),
        ('baseline = "gpt+"', 'names = "long"', "names must be 'full' or 'short', not 'long'"),
        ("batches = [128, 256]", "tune = 3", "grid.tune: chooses the learning rate, so lrs and batches must have one"),
        ("batches = [128, 256]", "tune = -3", "grid.tune = -3 must be from 0 to 64"),
        ("batches = [128, 256]", "tune = 1000000", "grid.tune = 1000000 must be from 0 to 64"),
        ("n_heads = 2", "", "the key 'shapes.a.n_heads' is missing"),
        ("threads = 1", "threads = 0", "threads must be from 1 to 1,024"),
        ("threads = 1", "threads = 1099511627776", "threads must be from 1 to 1,024"),
        ("[shapes.b]", '[shapes."b/c"]', "shapes.b/c: a name of letters"),
        ("[shapes.b]", '[shapes."32M"]', "shapes.32M: a name of letters"),
        ("device =", "seed = 3\ndevice =", "train.seed: runs of a study differ in it; say seeds in [[grid]]"),
        ("device =", "batch_tokens = 256\ndevice =", "train.batch_tokens"),
        ("[train.model]", "[train.optimizer]\nlr = 0.1\n[train.model]", "train.optimizer.lr"),
        ("vocab_size", 'architecture = "gpt+"\nvocab_size', "train.model.architecture"),
        ("gpus = 0", "gpus = -1", "slurm.gpus must be at least 0"),
        ("gpus = 0", "hours = 0", "slurm.hours must be at least 0.1"),
        ("cpus = 1", 'cpus = "1"', "slurm.cpus must be a whole number"),
    ],
)  # fmt: skip
def test_mistakes_are_named(read, old, new, message):
    with pytest.raises(UserError, match=re.escape(message)):
        read((old, new))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ("lr_limits = [0.005, 1]", "grid.lr_limits: 0.004, where gpt+-a-2.048k begins, lies outside them"),
        ("batch_limits = [64, 200]", "grid.batch_limits: 256, where gpt+-a-2.048k begins, lies outside them"),
    ],
)
def test_limits_enclose_the_grid(read, tmp_path, limits, message):
    with pytest.raises(UserError, match=re.escape(message)):
        names(read(("[shapes.a]", f"{limits}\n[shapes.a]")), tmp_path)


def test_the_file_of_the_docs_is_one(tmp_path):
    docs = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```toml\n(.*?)```", docs, flags=re.DOTALL)
    (tmp_path / "s.toml").write_text(text)
    study = Study.read(tmp_path / "s.toml", tmp_path)
    trained = {(name, "runs") for name in ("gpt+", "angpt", "angpt/no-lerp", "angpt:muon")}
    assert {(job.config.recipe, job.folder.parent.name) for job in study.jobs()} == {
        *trained, ("gpt+", "tuning"), ("angpt", "tuning")
    }  # fmt: skip


def test_a_study_has_a_grid(read):
    with pytest.raises(UserError, match=re.escape("a study has one [[grid]] at least")):
        read(text="[train]\n")
