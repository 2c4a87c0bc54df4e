import dataclasses
import json
import math
import time
import tomllib

import numpy as np
import pytest

from angpt.fits.rules import RULES
from tests.command import angpt
from tests.fits.synthetic import LAW, MODELS, MULTIPLES, Law, Valley, isoflop_records, sweep_records, write_csv
from tests.fits.test_records import make_run

SIZES, COMPUTES = np.geomspace(2e7, 4e9, 10), np.geomspace(3e18, 1e21, 8)


def sweeps(tmp_path, **options):
    records = sweep_records(Valley(), MODELS[:5], 0.001, **options)
    records += sweep_records(Valley(lr=(3e-3, -0.36)), MODELS[:5], 0.001, 1, rates=4, name="gpt+")
    return write_csv(tmp_path / "sweeps.csv", records, shuffle=0)


def test_hparams(tmp_path, capsys):
    out = tmp_path / "out"
    code, text = angpt(
        capsys, "fit", "hparams", sweeps(tmp_path), "--out", out, "--write-rules", tmp_path / "rules.toml"
    )
    assert code == 0
    for words in ("anGPT 506M", "GPT+ lr*(N, B)", "GPT+ B*(N)", "from the others ÷ found", "rule: "):
        assert words in text
    result = json.loads((out / "hparams.json").read_text())
    assert {t["architecture"] for t in result["trends"]} == {"gpt+", "angpt"}
    ours = next(t for t in result["trends"] if t["architecture"] == "angpt")
    low, high = (ours["lr"]["law"]["exponents"]["parameters"][k] for k in ("low", "high"))
    assert low < -0.45 < high  # at a fixed batch; at the best, which is N^0.5, the exponent is -0.2
    assert len(result["sizes"]) == 10
    names = {p.name for p in out.iterdir()}
    assert names == {
        "hparams.json",
        "hparams.md",
        *(f"{n}.{e}" for n in ("sweeps", "rates", "trends") for e in ("png", "svg", "csv")),
    }
    captions = (out / "hparams.md").read_text()
    assert "Diamonds: the two-stage estimates" in captions
    assert "lr = " in (tmp_path / "rules.toml").read_text()


def test_hparams_of_muon_are_told_from_those_of_adam(tmp_path, capsys):
    """Of one architecture with both optimizers: two laws and two rules; Adam's rate beside Muon is kept."""
    records = sweep_records(Valley(), MODELS[:5], 0.001)
    records += sweep_records(Valley(lr=(3e-2, -0.1)), MODELS[:5], 0.001, name="angpt:muon")
    source, rules = write_csv(tmp_path / "x.csv", records, shuffle=0), tmp_path / "rules.toml"
    code, text = angpt(capsys, "fit", "hparams", source, "--out", tmp_path / "out", "--write-rules", rules)
    assert code == 0
    assert "anGPT with Muon lr*(N, B)" in text
    found = {t["architecture"]: t["lr"] for t in json.loads((tmp_path / "out" / "hparams.json").read_text())["trends"]}
    assert set(found) == {"angpt", "angpt:muon"}
    low, high = (found["angpt:muon"]["law"]["exponents"]["parameters"][k] for k in ("low", "high"))
    assert low < -0.35 < high
    before, after = (tomllib.loads(path.read_text())["angpt:muon"] for path in (RULES, rules))
    assert after["lr_exponents"][1] == pytest.approx(-0.35, abs=0.05)  # all models are larger than the anchor
    for name in ("adam_lr", "adam_lr_tokens_exponent"):
        assert after[name] == before[name]


def test_hparams_over_tokens(tmp_path, capsys):
    """Sizes with several budgets give laws of parameters and tokens; with --multiple, of parameters alone."""
    valley, out = Valley(tokens=(0.4, -0.3)), tmp_path / "out"
    records = sweep_records(valley, MODELS[:3], 0.001, multiples=(5.0, 20.0, 60.0))
    source = write_csv(tmp_path / "x.csv", records, shuffle=0)
    code, text = angpt(capsys, "fit", "hparams", source, "--out", out, "--write-rules", tmp_path / "rules.toml")
    assert code == 0
    for words in ("anGPT lr*(N, D, B)", "anGPT B*(N, D)", "exponent of D", "anGPT 32M 641M", "over tokens"):
        assert words in text
    (law,) = json.loads((out / "hparams.json").read_text())["trends"]
    found = law["lr"]["law"]["exponents"]["tokens"]
    assert found["low"] < -0.5 < found["high"]
    assert {p.name for p in out.glob("*.png")} == {"sweeps.png", "rates.png", "tokens.png"}
    assert "lr_tokens_exponent = -0." in (tmp_path / "rules.toml").read_text()
    code, text = angpt(capsys, "fit", "hparams", source, "--out", out, "--multiple", 20)
    assert code == 0
    assert "anGPT lr*(N, B) " in text


def test_hparams_of_one_size(tmp_path, capsys):
    """The sweeps are drawn, but no law is fitted."""
    source = write_csv(tmp_path / "x.csv", sweep_records(Valley(), MODELS[:1], batches=1))
    code, text = angpt(capsys, "fit", "hparams", source, "--out", tmp_path / "out")
    assert code == 0
    assert "1 of 1 sweeps have a best rate inside: no law" in text
    assert "1 of 1 batch sizes have a best rate inside their grid, three are needed: no optimum" in text
    assert {p.name for p in (tmp_path / "out").glob("*.png")} == {"sweeps.png"}
    code, text = angpt(
        capsys, "fit", "hparams", source, "--out", tmp_path / "out", "--write-rules", tmp_path / "r.toml"
    )
    assert code == 2
    assert "there is no law to write" in text


def test_nothing_is_written_unless_all_of_it_can_be(tmp_path, capsys):
    source = write_csv(tmp_path / "x.csv", sweep_records(Valley(), MODELS))
    (tmp_path / "other.toml").write_text("lr = 3\n")
    (tmp_path / "file").touch()
    for rules, out, words in (
        ("other.toml", "new", "is not a file of rules"),
        ("no/rules.toml", "new", "cannot be written"),
        ("rules.toml", "file/new", "choose another --out"),
    ):
        before = sorted(tmp_path.rglob("*"))
        command = "fit", "hparams", source, "--out", tmp_path / out, "--write-rules", tmp_path / rules
        code, text = angpt(capsys, *command)
        assert code == 2
        assert words in text
        assert sorted(tmp_path.rglob("*")) == before
    out = tmp_path / "out"
    code, text = angpt(capsys, "fit", "hparams", source, "--out", out, "--write-rules", out / "rules.toml")
    assert code == 0
    assert (out / "rules.toml").exists()


def test_scaling(tmp_path, capsys):
    records = isoflop_records(Law(), SIZES, COMPUTES, 0.002, 0, "gpt+")
    records += isoflop_records(Law(A=380, B=380), SIZES, COMPUTES, 0.002, 1, "angpt")
    diverged = dataclasses.replace(records[0], loss=math.nan)
    out = tmp_path / "out"
    source = write_csv(tmp_path / "x.csv", [*records, diverged, records[5]], shuffle=1)
    code, text = angpt(capsys, "fit", "scaling", source, "--out", out, "--bootstrap", 100)
    assert code == 0
    for words in (
        "C = 6·N·D",
        "1 of 162 runs diverged",
        "1 runs are copies",
        "Compute relative to GPT+ at equal loss",
    ):
        assert words in text
    result = json.loads((out / "scaling.json").read_text())
    for name in ("gpt+", "angpt"):
        fit = result["architectures"][name]
        for approach in ("frontier", "isoflop"):
            assert fit[approach]["parameters"]["exponent"]["value"] == pytest.approx(0.4516, abs=0.03)
        assert fit["parametric"]["parameters"]["b"]["value"] == pytest.approx(0.28, abs=0.01)
        assert fit["frontier"]["saturating"]["E"]["value"] == pytest.approx(1.69, abs=0.1)
        assert len(fit["frontier"]["compute"]) == len(fit["frontier"]["losses"])
    assert len(result["comparisons"]) == 4
    figures = ("loss", "optimal", "isoflop", "parametric", "savings")
    assert {p.name for p in out.glob("*.svg")} == {f"{name}.svg" for name in figures}
    assert (out / "savings.csv").read_text().startswith("approach,architecture,loss,factor,low,high\nfrontier,angpt,")


def papers_design(law=LAW, noise=0.002):
    return [
        r for i, n in enumerate(MODELS) for r in isoflop_records(law, [n], 6 * n**2 * np.array(MULTIPLES), noise, i)
    ]


def test_scaling_of_the_papers_design(tmp_path, capsys):
    """Six sizes with budgets from half to five times Chinchilla's: at most two sizes have the same compute."""
    records = papers_design()
    code, text = angpt(
        capsys, "fit", "scaling", write_csv(tmp_path / "x.csv", records), "--out", tmp_path, "--bootstrap", 50
    )
    assert code == 0
    assert "anGPT N_opt(C)" in text
    assert "no figure 'IsoFLOP curves'" in text
    result = json.loads((tmp_path / "scaling.json").read_text())["architectures"]["angpt"]
    found = result["frontier"]["parameters"]["exponent"]
    assert found["low"] < 0.4516 < found["high"]
    assert found["high"] - found["low"] < 0.1
    assert result["isoflop"]["none"].startswith("no level of compute")
    assert result["parametric"]["exponents"]["N_opt(C)"]["value"] == pytest.approx(0.4516, abs=0.05)


def test_folders_and_files_together(tmp_path, capsys):
    """Runs of this package, of which the smallest are in folders."""
    for i, d in enumerate((16, 32, 48)):
        make_run(tmp_path / "runs" / f"a{d}", loss=4.0 - 0.5 * i, d_model=d)
    code, text = angpt(
        capsys, "fit", "scaling", tmp_path / "runs", "--out", tmp_path / "out", "--curves", "--count", "none"
    )
    assert code == 0
    assert "N: parameters without embedding and head; C = 6·N·D" in text
    assert "6 evaluations during runs" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("hparams",), "name study folders, run folders or CSV files"),
        (("hparams", "nothing.csv"), "nothing.csv: does not exist"),
        (("hparams", "{file}", "--multiple", "-1"), "--multiple -1.0: must be positive"),
        (("hparams", "{file}", "--architectures", "gpt"), "no run has this architecture: did you mean"),
        (("scaling", "{file}", "--count", "head"), "has no embedding_parameters"),
        (("scaling", "{file}", "--count", "given", "--attention"), "leave out --attention"),
        (("scaling", "{file}", "--curves"), "the runs have no curves"),
        (("scaling", "{file}", "--out", "{file}"), "cannot be written"),
        (("scaling", "{file}", "--count", "some"), "--count"),
    ],
)  # fmt: skip
def test_mistakes_exit_with_2(tmp_path, capsys, args, message):
    file = str(sweeps(tmp_path))
    code, text = angpt(capsys, "fit", *(a.replace("{file}", file) for a in args))
    assert code == 2
    assert message in text
    assert "Traceback" not in text


def many_records():
    records = []
    for i, (name, law) in enumerate((("gpt+", Law()), ("angpt", Law(A=380, B=380)))):
        for seed in range(2):
            made = isoflop_records(
                law, np.geomspace(2e7, 5e9, 50), np.geomspace(1e18, 1e21, 50), 0.003, 2 * i + seed, name
            )
            records += [dataclasses.replace(r, seed=str(seed)) for r in made]
    return records


def scattered_records():
    rng = np.random.default_rng(0)
    records = []
    for name, law in (("gpt+", Law()), ("angpt", Law(A=380, B=380))):
        for n, ratio in zip(np.exp(rng.uniform(16, 22, 5000)), np.exp(rng.uniform(1, 5, 5000)), strict=True):
            records += isoflop_records(law, [n], [6 * n * ratio * n], 0.003, int(n), name)
    return records


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("make", [many_records, scattered_records])
def test_ten_thousand_runs_in_half_a_minute(tmp_path, capsys, make):
    source = write_csv(tmp_path / "x.csv", make(), shuffle=0)
    start = time.perf_counter()
    code, _ = angpt(capsys, "fit", "scaling", source, "--out", tmp_path)
    assert code == 0
    assert time.perf_counter() - start < 30
    sizes = list(np.geomspace(2e7, 2e9, 20))
    records = [
        r
        for i, n in enumerate(("gpt+", "ngpt", "angpt"))
        for r in sweep_records(Valley(), sizes, 0.002, i, 10, 10, 2, n)
    ]
    source = write_csv(tmp_path / "h.csv", records[:10_000], shuffle=0)
    start = time.perf_counter()
    code, _ = angpt(capsys, "fit", "hparams", source, "--out", tmp_path)
    assert code == 0
    assert time.perf_counter() - start < 30
