import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from angpt.analysis import learned, moments, shift_charts
from angpt.analysis.analyse import PARTS, Analysis, analyse, labels, open_text, state_of
from angpt.analysis.claims import claims
from angpt.analysis.history import History
from angpt.analysis.inputs import conditions, text_batches, token_counts
from angpt.errors import UserError
from angpt.inference.source import open_source
from angpt.serialization import json_values, read_toml, seal, to_toml, unseal
from angpt.training.launch import start
from angpt.training.record import RunRecord
from angpt.training.reporter import Quiet
from angpt.training.run import Run
from tests.analysis.parts import measure_attention, measure_factors, measure_norms, measure_robustness
from tests.training.conftest import small

TOKENS = 256


@pytest.fixture(scope="module")
def analysis(runs):
    return analyse(list(runs.values()), tokens=TOKENS)


def test_every_part_equals_a_measurement_of_its_own(runs, analysis):
    for (name, path), found in zip(runs.items(), analysis.runs, strict=True):
        record, stored = RunRecord.open(path), open_source(path)
        source = open_text(record.config, None, state_of(stored))
        model = stored.decoder()
        counts = token_counts(source.train, source.vocab_size)
        history = History.of(record.layers)

        def text(source=source):
            return text_batches(source, TOKENS, 4096)

        assert found.norms == measure_norms(model, text(), history), name
        assert found.factors == measure_factors(model, text())
        assert found.learned == learned.measure(model, counts, history)
        assert found.moments == moments.measure(History.of(record.moments), 0.1 if name == "gpt+" else 0.0)
        assert found.robustness == measure_robustness(model, text(), conditions(source, TOKENS // 8, counts), 4096)
        assert found.attention == measure_attention(model, text())


def test_an_analysis_describes_its_runs(runs, analysis):
    assert [run.label for run in analysis.runs] == ["GPT+", "GPT+ without warm-up", "nGPT", "anGPT"]
    last = analysis.runs[-1]
    assert (last.run, last.architecture, last.step, last.layers, last.context) == ("angpt", "angpt", 12, 2, 32)
    assert (last.tokens, last.measured_tokens, last.seed) == (12 * 256, TOKENS, 0)
    assert last.loss == pytest.approx(last.robustness.shifts[0].loss)
    assert last.moments.steps == (1, 10)
    assert last.norms.history.steps == (0, 4, 8, 12)
    assert last.norms.history.values["input_norm"][-1] == pytest.approx([s.mean for s in last.norms.stream], rel=0.2)
    assert "alpha_a_size" in last.learned.history.values
    assert {m.name for m in last.robustness.missing} == {"whitespace", "German", "Russian"}


def test_an_analysis_is_read_back_from_its_file(analysis, tmp_path):
    analysis.write(tmp_path / "analysis.json")
    assert Analysis.read(tmp_path / "analysis.json") == analysis


@pytest.mark.parametrize("part", PARTS)
def test_a_part_alone_is_the_same_as_among_all(runs, analysis, part):
    alone = analyse([runs["angpt"]], [part], tokens=TOKENS).runs[0]
    assert getattr(alone, part) == getattr(analysis.runs[-1], part)
    assert all(getattr(alone, other) is None for other in PARTS if other != part)


def test_moments_alone_need_no_text(runs, tmp_path):
    moved = tmp_path / "run"
    shutil.copytree(runs["gpt+"], moved)
    text = (moved / "config.toml").read_text()
    config = read_toml(type(Run.open(moved).config()), moved / "config.toml")
    gone = dataclasses.replace(config, data=dataclasses.replace(config.data, path="/nowhere"))
    (moved / "config.toml").write_text(to_toml(gone))
    assert text != (moved / "config.toml").read_text()
    assert analyse([moved], ["moments"]).runs[0].moments is not None
    with pytest.raises(UserError, match="/nowhere: no such file or folder"):
        analyse([moved], ["norms"])
    given = analyse([moved], ["norms"], data=config.data.path, tokens=TOKENS)
    assert given.runs[0].norms is not None


def test_a_run_that_recorded_nothing_has_no_moments(runs, tmp_path):
    quiet = tmp_path / "run"
    shutil.copytree(runs["gpt+"], quiet)
    lines = (quiet / "metrics.jsonl").read_text().splitlines(keepends=True)
    (quiet / "metrics.jsonl").write_text("".join(line for line in lines if '"moments"' not in line))
    assert analyse([quiet], ["moments"]).runs[0].moments is None


def test_progress_ends_at_the_total(runs):
    heard = []
    analyse([runs["angpt"]], tokens=TOKENS, tick=lambda *args: heard.append(args))
    assert {name for name, _, _ in heard} == {"angpt"}
    assert [done for _, done, _ in heard] == sorted(done for _, done, _ in heard)
    _, done, total = heard[-1]
    assert done == total


def test_labels_tell_runs_apart(runs, tmp_path):
    configs = {name: Run.open(path).config() for name, path in runs.items()}
    twice = [(tmp_path / "a", configs["angpt"]), (tmp_path / "b", configs["angpt"]), (tmp_path / "c", configs["gpt+"])]
    assert labels(twice) == ["anGPT (a)", "anGPT (b)", "GPT+"]
    namesakes = [(tmp_path / "a" / "run", configs["angpt"]), (tmp_path / "b" / "run", configs["angpt"])]
    assert labels(namesakes) == [f"anGPT ({tmp_path}/a/run)", f"anGPT ({tmp_path}/b/run)"]


def test_a_run_with_muon_is_not_taken_for_one_with_adam(runs, tokens, tmp_path):
    start(small(tokens, record_moments=True, optimizer__name="muon"), tmp_path / "muon", Quiet())
    found = analyse([tmp_path / "muon", runs["angpt"], runs["gpt+"]], ["learned", "moments"], tokens=TOKENS)
    assert [run.architecture for run in found.runs] == ["angpt:muon", "angpt", "gpt+"]
    assert [run.label for run in found.runs] == ["anGPT with Muon", "anGPT", "GPT+"]
    assert claims(Analysis(found.runs[:1])) == []  # the paper's claims are about Adam
    assert claims(found) == claims(Analysis(found.runs[1:]))
    assert "Adam's" not in shift_charts.moments(found).title


def test_documents_are_masked_as_in_the_run(runs, tmp_path):
    """Masking needs prepared data: raw tokens do not say where documents end."""
    masked = tmp_path / "run"
    shutil.copytree(runs["angpt"], masked)
    config = Run.open(masked).config()
    changed = dataclasses.replace(config, data=dataclasses.replace(config.data, mask_documents=True))
    (masked / "config.toml").write_text(to_toml(changed))
    for file in masked.glob("checkpoints/*/state.json"):
        state = unseal(json_values(file))
        file.write_text(json.dumps(seal(state | {"config": dataclasses.asdict(changed)})))
    with pytest.raises(UserError, match="do not say where documents end"):
        analyse([masked], ["attention"], tokens=TOKENS)


def test_mistakes_say_what_to_do(runs, tmp_path, tokens):
    with pytest.raises(UserError, match="unknown part 'norm': did you mean norms"):
        analyse([runs["angpt"]], ["norm"])
    with pytest.raises(UserError, match="at least one run folder"):
        analyse([])
    with pytest.raises(UserError, match="tokens = 0"):
        analyse([runs["angpt"]], tokens=0)
    with pytest.raises(UserError, match="no run folder"):
        analyse([tmp_path])
    with pytest.raises(UserError, match="angpt: is named twice"):
        analyse([runs["angpt"], runs["gpt+"], runs["angpt"]])
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="sees no GPU"):
            analyse([runs["angpt"]], device="cuda")
    other = tmp_path / "other"
    other.mkdir()
    for split in ("train", "val"):
        np.full(500, 300, "<u2").tofile(other / f"{split}.bin")
    with pytest.raises(UserError, match=r"has token 300, but the model's vocabulary has 61; choose the --data"):
        analyse([runs["angpt"]], data=str(other))


def test_damaged_files_are_named(runs, tmp_path):
    broken = tmp_path / "run"
    shutil.copytree(runs["angpt"], broken)
    with (broken / "metrics.jsonl").open("a") as file:
        file.write("{broken}\n")
    with pytest.raises(UserError, match=r"metrics.jsonl, line 22: is no record of a run"):
        analyse([broken], ["norms"], tokens=TOKENS)
    shutil.rmtree(broken / "checkpoints")
    (broken / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no good checkpoint"):
        analyse([broken], ["norms"])


def test_a_truncated_checkpoint_is_skipped(runs, tmp_path):
    broken = tmp_path / "run"
    shutil.copytree(runs["angpt"], broken)
    newest = sorted((broken / "checkpoints").iterdir())[-1]
    content = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.warns(UserWarning, match="skipping a damaged checkpoint"):
        found = analyse([broken], ["learned"])
    assert found.runs[0].step == 10


def test_a_file_of_another_format_is_named_in_the_error(tmp_path):
    path = tmp_path / "analysis.json"
    for text in ("", "[]", '{"runs": [{"nonsense": 1}]}', json.dumps({"runs": 3})):
        path.write_text(text)
        with pytest.raises(UserError, match=r"analysis.json: cannot be read"):
            Analysis.read(path)
