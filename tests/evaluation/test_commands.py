"""The command `angpt eval`."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from angpt.evaluation import evaluate as module
from angpt.evaluation.results import read_results, with_error
from angpt.evaluation.tasks import PAPER, TASKS
from angpt.inference.source import open_source
from tests.command import call
from tests.evaluation.material import CONFIG, SAMPLES, small_run

pytest.importorskip("lm_eval")


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    return small_run(tmp_path / "angpt-small", prepared)


def words(text: str) -> str:
    return " ".join(text.split())


def fails(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    code, out, err = call(capsys, "eval", *map(str, args))
    assert code == 2, out + err
    assert "Traceback" not in err
    return words(err)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions that were called."""
    made: list[str] = []
    for name in ("score", "losses"):
        original = getattr(module, name)

        def noted(*args: object, original: object = original, name: str = name) -> object:
            made.append(name)
            return original(*args)  # type: ignore[operator]

        monkeypatch.setattr(module, name, noted)
    return made


def test_without_data_the_loss_on_what_a_run_was_trained_on(
    capsys: pytest.CaptureFixture[str], folder: Path, prepared: Path, calls: list[str]
) -> None:
    code, out, _ = call(capsys, "eval", str(folder))
    assert code == 0
    results = read_results(folder)
    assert results is not None
    (loss,) = results.losses
    assert loss.data == str(prepared)
    for shown in (f"{loss.loss:.4f}", f"{loss.bits_per_byte:.4f}", results.model.weights[:16], f"{loss.tokens:,}"):
        assert shown in out
    assert results.model.weights == open_source(folder).sha256()
    code, again, _ = call(capsys, "eval", str(folder), "--data", f"{prepared}/../{prepared.name}")  # the same tokens
    assert code == 0
    assert calls == ["losses"]
    assert "known already" in again


def test_all_tasks_of_two_models_side_by_side(
    capsys: pytest.CaptureFixture[str], folder: Path, prepared: Path, benchmarks: Path, tmp_path: Path, calls: list[str]
) -> None:
    other = small_run(tmp_path / "other", prepared, seed=1)
    args = ("eval", str(folder), str(other), "--data", str(benchmarks), str(prepared))
    code, out, _ = call(capsys, *args)
    assert code == 0
    assert calls == 2 * ["losses", *["score"] * len(PAPER)]
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    for path in (folder, other):
        results = read_results(path)
        assert results is not None
        assert [r.origin.task for r in results.tasks] == list(PAPER)
        for result in results.tasks:
            task = TASKS[result.origin.task]
            assert (result.metric, result.samples) == (task.metric, SAMPLES[task.name])
            assert result.stderr is not None
            assert with_error((result.value, result.stderr)) in rows[task.label]
            assert f"{task.metric} {'↑' if task.metric == 'acc' else '↓'}" in words(rows[task.label])
            assert f"{result.samples:,} samples" in out
    assert call(capsys, *args)[0] == 0
    assert len(calls) == 2 * (1 + len(PAPER))


def test_a_killed_evaluation_continues_with_the_current_task(
    capsys: pytest.CaptureFixture[str], folder: Path, benchmarks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, count = module.score, 0

    def killed(*args: object) -> object:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "score", killed)
    names = ("piqa", "arc_easy", "winogrande", "lambada_openai")
    args = ("eval", str(folder), "--data", str(benchmarks), "--tasks", *names)
    assert call(capsys, *args)[0] == 130
    done = read_results(folder)
    assert done is not None
    assert len(done.tasks) == 2
    code, out, _ = call(capsys, *args)
    assert code == 0
    assert count == 5
    assert "known already: piqa arc_easy" in out
    after = read_results(folder)
    assert after is not None
    assert after.tasks[:2] == done.tasks
    assert len(after.tasks) == 4


def test_a_limited_result_says_so_and_is_not_reused_for_all_samples(
    capsys: pytest.CaptureFixture[str], folder: Path, benchmarks: Path, calls: list[str]
) -> None:
    args = ("eval", str(folder), "--data", str(benchmarks), "--tasks", "piqa", "mmlu")
    code, out, _ = call(capsys, *args, "--limit", "2")
    assert code == 0
    assert "over 2 of 7 samples" in out
    assert "over 8 of 12 samples" in out  # two of each subject
    _, out, _ = call(capsys, *args)
    assert "over 7 samples" in out
    assert calls == ["score"] * 4


def test_a_given_precision_is_used(
    capsys: pytest.CaptureFixture[str], folder: Path, benchmarks: Path, calls: list[str]
) -> None:
    """Without --precision, existing scores of any precision are used."""
    args = ("eval", str(folder), "--data", str(benchmarks), "--tasks", "wikitext")
    found = []
    for options in ((), ("--precision", "bf16"), (), ("--precision", "fp32")):
        assert call(capsys, *args, *options)[0] == 0
        results = read_results(folder)
        assert results is not None
        found.append((results.tasks[0].scored.precision, results.tasks[0].value))
    assert [precision for precision, _ in found] == ["fp32", "bf16", "bf16", "fp32"]
    assert found[0] == found[3] != found[1]
    assert calls == ["score"] * 3


def test_new_weights_are_evaluated_again(
    capsys: pytest.CaptureFixture[str], folder: Path, prepared: Path, benchmarks: Path, calls: list[str]
) -> None:
    args = ("eval", str(folder), "--data", str(benchmarks), "--tasks", "piqa")
    call(capsys, *args)
    before = read_results(folder)
    small_run(folder, prepared, seed=9, step=10)
    _, out, _ = call(capsys, *args)
    after = read_results(folder)
    assert before is not None
    assert after is not None
    assert before.model.weights != after.model.weights
    assert f"older weights ({before.model.weights[:16]}) are replaced" in out
    assert calls == ["score", "score"]
    assert len(list((folder / "eval" / "scores").iterdir())) == 1


WITHOUT = """
import sys
hidden, *args = sys.argv[1:]
sys.modules.update(dict.fromkeys(hidden.split(",")))  # an import of these is an error now
import angpt.cli.main
angpt.cli.main.main(args)
"""


def run_without(hidden: str, *args: object) -> subprocess.CompletedProcess[str]:
    """The command in a process where packages are not installed."""
    command = [sys.executable, "-c", WITHOUT, hidden, "eval", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_scoring_needs_no_harness_and_metrics_need_no_weights(
    capsys: pytest.CaptureFixture[str], folder: Path, prepared: Path, benchmarks: Path, tmp_path: Path
) -> None:
    names = ("piqa", "wikitext", "mmlu")
    asked = ("--data", str(benchmarks), "--tasks", *names)
    requests = tmp_path / "requests"
    code, out, _ = call(capsys, "eval", str(folder), *asked, "--write-requests", str(requests))
    assert code == 0
    assert f"mmlu.safetensors: {4 * SAMPLES['mmlu']} requests from {SAMPLES['mmlu']} samples" in words(out)
    assert not (folder / "eval").exists()

    there = tmp_path / "there"
    shutil.copytree(folder, there)
    made = run_without("lm_eval,datasets,transformers,pyarrow", there, "--requests", requests)
    assert made.returncode == 0, made.stderr
    assert "mmlu: 48 requests scored" in made.stdout

    code, _, _ = call(capsys, "eval", str(folder), *asked)
    shutil.rmtree(there / "checkpoints")
    code, out, err = call(capsys, "eval", str(there), *asked)
    assert code == 0, err
    here, back = read_results(folder), read_results(there)
    assert here is not None
    assert back is not None
    assert here.model.weights == back.model.weights
    assert [(r.origin, r.metrics) for r in here.tasks] == [(r.origin, r.metrics) for r in back.tasks]

    missing = fails(capsys, there, "--data", benchmarks, "--tasks", "winogrande")
    assert "has no weights" in missing
    (there / "config.toml").unlink()  # nothing but eval/ came back
    assert fails(capsys, there, *asked).startswith("error: " + str(there) + ": no tokenizer.json in")
    assert call(capsys, "eval", str(there), *asked, "--tokenizer", str(prepared))[0] == 0


def test_existing_requests_are_kept(
    capsys: pytest.CaptureFixture[str],
    prepared: Path,
    benchmarks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = ("eval", "--tokenizer", str(prepared), "--data", str(benchmarks), "--tasks", "piqa", "--write-requests",
            str(tmp_path / "requests"))  # fmt: skip
    _, first, _ = call(capsys, *args)
    monkeypatch.setattr(module.Harness, "build", None)
    assert call(capsys, *args) == (0, first, "")


def test_a_model_of_another_tokenizer_is_refused(
    capsys: pytest.CaptureFixture[str], folder: Path, benchmarks: Path, tmp_path: Path
) -> None:
    from tests.data.corpora import prepare

    source = tmp_path / "a.txt"
    source.write_text("some other text " * 50)
    other = tmp_path / "other-data"
    prepare((str(source), str(source)), other, tokenizer="bpe:260")
    assert "prepared with a tokenizer other than that of" in fails(capsys, folder, "--data", other)
    assert "is not the tokenizer that" in fails(
        capsys, folder, "--data", benchmarks, "--tasks", "piqa", "--tokenizer", other
    )
    requests = tmp_path / "requests"
    args = ("--tokenizer", str(other), "--data", str(benchmarks), "--tasks", "piqa", "--write-requests", str(requests))
    assert call(capsys, "eval", *args)[0] == 0
    assert "made with a tokenizer other than that of" in fails(capsys, folder, "--requests", requests)


def test_mistakes(capsys: pytest.CaptureFixture[str], folder: Path, benchmarks: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for args, message in [
        ((), "name a run folder, a folded model or an export"),
        ((tmp_path / "nothing",), "nothing: does not exist"),
        ((empty,), "empty: no model in it"),
        ((folder, "--data", empty), "no tokens of the split 'val'"),
        ((folder, "--data", tmp_path / "nothing"), "no such file or folder"),
        ((folder, "--data", benchmarks / "mmlu"), "no tokens of the split 'val'"),
        ((folder, "--data", benchmarks, "--tasks", "piqua"), "unknown task 'piqua': did you mean piqa"),
        ((folder, "--data", benchmarks, benchmarks), "both hold benchmarks"),
        ((folder, "--requests", empty), "has no requests; write them with --write-requests"),
        ((folder, "--requests", empty, "--tasks", "piqa"), "piqa.safetensors: cannot be read"),
        ((folder, "--requests", empty, "--write-requests", empty), "give one of the two"),
        ((folder, "--requests", empty, "--limit", "3"), "--limit does not apply to --requests"),
        ((folder, "--limit", "0"), "--limit 0: must be at least 1"),
        ((folder, "--batch-tokens", "-1"), "--batch-tokens -1: must be at least 1"),
        (("--write-requests", empty), "name a model, or a tokenizer with --tokenizer"),
    ]:
        assert message in fails(capsys, *args), args


def test_damaged_results_and_weights_are_named(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert call(capsys, "eval", str(folder))[0] == 0
    path = folder / "eval" / "results.json"
    path.write_text(path.read_text()[:-30])
    assert "results.json: cannot be read" in fails(capsys, folder)
    path.unlink()
    weights = next(folder.glob("checkpoints/*/model.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.warns(UserWarning, match="damaged"):
        assert "no good checkpoint" in fails(capsys, folder)


def test_without_the_harness_the_extra_is_named(folder: Path, benchmarks: Path) -> None:
    made = run_without("lm_eval", folder, "--data", benchmarks, "--tasks", "piqa")
    assert made.returncode == 2
    assert "this needs lm_eval: pip install 'angpt[eval]'" in words(made.stderr)


def test_a_folder_that_cannot_be_written_to_is_named(
    capsys: pytest.CaptureFixture[str], folder: Path, benchmarks: Path, tmp_path: Path
) -> None:
    (folder / "eval").write_text("in the way")
    assert "eval/results.json: cannot be written" in fails(capsys, folder)
    asked = (folder, "--data", benchmarks, "--tasks", "piqa")
    assert "cannot be written" in fails(capsys, *asked)
    assert "piqa.safetensors: cannot be written" in fails(capsys, *asked, "--write-requests", folder / "eval")


def test_two_processes_add_to_the_same_results(
    capsys: pytest.CaptureFixture[str], folder: Path, prepared: Path, benchmarks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one computes a loss, another finishes a task."""
    original = module.losses

    def meanwhile(*args: object) -> object:
        monkeypatch.setattr(module, "losses", original)
        assert call(capsys, "eval", str(folder), "--data", str(benchmarks), "--tasks", "piqa")[0] == 0
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "losses", meanwhile)
    assert call(capsys, "eval", str(folder), "--data", str(prepared))[0] == 0
    results = read_results(folder)
    assert results is not None
    assert (len(results.losses), len(results.tasks)) == (1, 1)


def test_a_missing_gpu_is_named(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert "torch sees no GPU" in fails(capsys, folder, "--device", "cuda")


def test_a_short_context_cuts_requests_and_says_so(
    capsys: pytest.CaptureFixture[str], prepared: Path, benchmarks: Path, tmp_path: Path
) -> None:
    tiny = small_run(tmp_path / "tiny", prepared, config=dataclasses.replace(CONFIG, context=8))
    code, out, _ = call(capsys, "eval", str(tiny), "--data", str(benchmarks), "--tasks", "piqa", "wikitext")
    assert code == 0
    results = read_results(tiny)
    assert results is not None
    piqa, wikitext = results.tasks
    assert piqa.scored.cut > 0
    assert piqa.scored.windowed > 0
    assert f"{piqa.scored.cut} requests were cut on the left" in words(out)
    assert f"{piqa.scored.windowed} continuations longer than the context were scored in windows" in words(out)
    assert wikitext.scored.windowed == SAMPLES["wikitext"]
    assert out.count("in windows") == 1
