from pathlib import Path

import pytest
import torch

from angpt.evaluation.results import Evaluated, LossResult, Results, write_results
from angpt.inference.source import open_source
from angpt.training.run import Run
from tests.command import call
from tests.inference.conftest import byte_model, write_run


def test_generate_prints_text_with_no_options(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "generate", run.path)
    assert (code, err) == (0, "")
    assert len(out) > 10
    assert call(capsys, "generate", run.path)[1] == out


def test_a_prompt_is_continued_and_a_seed_matters(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [call(capsys, "generate", run.path, "ab", "--tokens", 9, "--seed", seed)[1] for seed in (0, 1)]
    assert all(text.startswith("ab") and text.endswith("\n") for text in texts)
    assert texts[0] != texts[1]


def test_several_prompts_are_what_they_are_alone(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """A row of a batch has the next seed."""
    _, together, _ = call(capsys, "generate", run.path, "ab", "c", "--tokens", 9)
    alone = [call(capsys, "generate", run.path, p, "--tokens", 9, "--seed", s)[1] for s, p in enumerate(("ab", "c"))]
    assert together == f"[1] {alone[0]}\n[2] {alone[1]}"


def test_fold_export_and_import_write_the_same_text(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, expected, _ = call(capsys, "generate", run.path, "x", "--temperature", 0)
    for verb, out in (("fold", "run-folded"), ("export hf", "run-hf")):
        code, text, _ = call(capsys, *verb.split(), run.path)
        assert code == 0
        assert out in text
        assert call(capsys, "generate", tmp_path / out, "x", "--temperature", 0)[1] == expected
    assert call(capsys, "import", "hf", tmp_path / "run-hf", "--out", tmp_path / "back")[0] == 0
    assert call(capsys, "generate", tmp_path / "back", "x", "--temperature", 0)[1] == expected


@pytest.mark.parametrize("where", [".", "checkpoints/.."])
def test_a_model_is_folded_and_exported_from_inside_its_folder(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.chdir(run.path)
    for verb, out in (("fold", "run-folded"), ("export hf", "run-hf")):
        assert call(capsys, *verb.split(), where)[0] == 0
        assert open_source(tmp_path / out).path.exists()
    (tmp_path / "run-data" / "tokenizer.json").unlink()
    for verb in ("fold", "export hf"):
        with pytest.warns(UserWarning, match=rf"{verb}: has no tokenizer.json, because none was found in"):
            assert call(capsys, *verb.split(), where, "--out", tmp_path / verb)[0] == 0


def test_a_card_has_the_evaluation_of_the_exported_weights_alone(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def card(weights: str, out: str) -> str:
        model = Evaluated("run", "run", weights, 64, 260, None)
        loss = LossResult("data/mine", "val", "", None, 3, 192, 1.2345, 0.0102, 3.437, None, "fp32", "cpu", 1.0)
        write_results(run.path, Results(model, (loss,)))
        assert call(capsys, "export", "hf", run.path, "--out", tmp_path / out)[0] == 0
        return (tmp_path / out / "README.md").read_text()

    assert "| data/mine val | loss | 192 | 1.2345 ± 0.0102 |" in card(open_source(run.path).sha256(), "same")
    assert "data/mine" not in card("of other weights", "other")


def test_fold_shows_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "fold", "--table")
    assert code == 0
    assert "angpt/attention-factor" in out


def test_bf16_on_the_cpu_writes_text(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "generate", run.path, "x", "--precision", "bf16", "--tokens", 5)
    assert code == 0
    assert out.startswith("x")


def test_a_sliding_window_goes_beyond_the_context(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--tokens", 100, "--temperature", 0)
    code, _, err = call(capsys, "generate", run.path, "x", *options)
    assert code == 2
    assert "--sliding" in err
    assert call(capsys, "generate", run.path, "x", *options, "--sliding")[0] == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", "nowhere"), "nowhere: does not exist"),
        (("generate", "{run}", "x", "--top-p", "2"), "top_p must be in (0, 1]"),
        (("generate", "{run}", "x", "--repetition-penalty", "1e-300"), "repetition_penalty must be from 1e-06 to"),
        (("generate", "{run}", "x", "--device", "cuda"), "torch sees no GPU here; use --device cpu"),
        (("generate", "{run}", "x", "--stop", ""), "stop string must not be empty"),
        (("generate", "{run}", "x", "--tokens", "0"), "at least one token"),
        (("generate", "{run}", "x", "--seed", "-1"), "seed must not be negative"),
        (("generate", "{run}", "x\udcff"), "a prompt is not valid Unicode"),
        (("fold",), "which model?"),
        (("fold", "{run}", "--out", "{run}"), "exists"),
        (("export", "hf", "nowhere"), "does not exist"),
        (("import", "hf", "{run}", "--out", "{run}-2"), "is not an export"),
    ],
)
def test_mistakes_exit_with_2_and_one_line(
    run: Run, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
) -> None:
    if "cuda" in args and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, out, err = call(capsys, *(a.format(run=run.path) for a in args))
    assert code == 2
    assert message in err
    assert out == ""
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["gpt+", "ngpt"])
def test_other_architectures_generate_too(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_run(tmp_path / "other", byte_model(name))
    assert call(capsys, "generate", other.path, "--tokens", 3)[0] == 0
    assert open_source(other.path).cfg.architecture == name
