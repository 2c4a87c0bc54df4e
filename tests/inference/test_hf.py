import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from torch import Tensor

import angpt
from angpt.data.tokenizers import load_tokenizer
from angpt.errors import UserError
from angpt.evaluation.evaluate import evaluate
from angpt.inference import hf, store
from angpt.inference.fold import fold
from angpt.inference.generate import generate, generate_text
from angpt.inference.sampling import GREEDY
from angpt.inference.source import open_source
from angpt.models import variants
from angpt.models.angpt import AnGPT, AnGPTBlock
from angpt.models.variants import ARCHITECTURES
from angpt.training.run import Run
from tests.data.corpora import prepare
from tests.inference.conftest import byte_model, write_run

pytest.importorskip("transformers")
NAMES = sorted(ARCHITECTURES)
MAIN = ["gpt+", "ngpt", "angpt"]
TOKENS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))


def folder_of(name: str) -> str:
    return name.replace("/", "-")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports of all architectures."""
    path = tmp_path_factory.mktemp("exports")
    for name in NAMES:
        run = write_run(path / "runs" / folder_of(name), byte_model(name))
        hf.export(open_source(run.path), path / "hf" / folder_of(name))
        if name in MAIN:
            hf.export(open_source(run.path), path / "hf" / "engine" / name, engine=True)
    (path / "hf" / "tokens.json").write_text(json.dumps(TOKENS.tolist()))
    return path


@pytest.fixture(scope="module")
def used(root: Path) -> dict[str, Any]:
    """What transformers makes of them, in a process that cannot import angpt and has no network."""
    out = root / "used.json"
    program = Path(__file__).with_name("load_exports.py").read_text()
    (root / "program.py").write_text(program)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "home"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "program.py", "hf", str(out)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-3000:]
    for complaint in ("not initialized", "not used", "deprecated", "Traceback"):
        assert complaint not in done.stderr
    return json.loads(out.read_text())


def relative_error(found: list[Any], expected: Tensor) -> float:
    return float((torch.tensor(found, dtype=torch.float64) - expected).abs().max() / expected.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_of_an_export_are_ours(used: dict[str, Any], name: str) -> None:
    found, model = used[folder_of(name)], byte_model(name)
    assert relative_error(found["logits"], model(TOKENS).double()) < 1e-5
    assert relative_error(found["double"], model.double()(TOKENS)) < 1e-12
    assert found["cached"] == generate(byte_model(name), TOKENS[:, :5], 12, GREEDY)


@torch.no_grad()
@pytest.mark.parametrize("name", MAIN)
def test_what_transformers_offers_works(used: dict[str, Any], name: str) -> None:
    found, model = used[name], byte_model(name)
    assert found["uncached"] == found["static"] == found["cached"]
    assert found["padding_side"] == "left"
    assert found["padded"] == found["alone"]
    assert found["padded"] == generate(model, [list(b"a"), list(b"several bytes")], 12, GREEDY)
    assert relative_error(found["eager"], model(TOKENS).double()) < 1e-5
    greedy, beams = found["beam_scores"]
    assert found["beams"] == 17
    assert beams >= greedy
    assert relative_error(found["bf16"], model(TOKENS).double()) < 0.05
    assert found["bf16_tokens"] == 17
    assert found["bf16_dtypes"] == ["1 torch.float32", "2 torch.bfloat16"]
    assert (found["hidden_states"], found["kept"], found["tuple"], found["sampled"]) == (3, 1, True, 9)
    assert found["loss"] == pytest.approx(float(model(TOKENS[:, :-1], TOKENS[:, 1:])), rel=1e-5)
    assert found["ids"] == load_tokenizer("bytes").encode("déjà <|x|>").ids
    assert found["defaults"] == [0.8, 50]


@pytest.mark.parametrize("name", MAIN)
def test_a_compiled_generate_has_one_graph_for_all_tokens_and_prompts(used: dict[str, Any], name: str) -> None:
    found = used[name]["compiled"]
    assert found["breaks"] == 0
    for length, (tokens, graphs) in found["tokens"].items():
        assert tokens == generate(byte_model(name), TOKENS[:, : int(length)], 9, GREEDY)
        assert graphs == 1


@pytest.mark.parametrize("name", MAIN)
def test_flash_attention_would_be_called_as_it_must_be(used: dict[str, Any], name: str) -> None:
    """In low precision, without a mask for rows without padding, causal, with the scale already in q."""
    found = used[name]["flash"]
    assert found["error"] == 0
    assert found["calls"] == [["torch.bfloat16"] * 3 + [True, True, 1.0, 0.0]]


@torch.no_grad()
@pytest.mark.parametrize("name", MAIN)
def test_engines_compute_the_logits_from_the_base_model_and_lm_head(used: dict[str, Any], name: str) -> None:
    found, model = used[name]["engine"], byte_model(name)
    assert relative_error(found["logits"], model(TOKENS).double()) < 1e-5
    assert found["tokens"] == generate(model, TOKENS[:, :5], 12, GREEDY)
    assert found["low"] == "torch.bfloat16"


def test_an_export_for_engines_is_not_imported(root: Path) -> None:
    with pytest.raises(UserError, match="exported for engines, which cannot be undone; give the run"):
        open_source(root / "hf" / "engine" / "angpt")
    card = (root / "hf" / "engine" / "angpt" / "README.md").read_text()
    assert "cannot be imported again" in card
    assert "ConstrainCallback" not in card


@pytest.mark.parametrize("name", MAIN)
def test_layers_are_called_so_that_hooks_and_checkpointing_work(used: dict[str, Any], name: str) -> None:
    found = used[name]["tools"]
    assert found["hooks"]
    assert found["checkpointing"]["calls"] == [1, 2]  # computed again in the backward pass
    assert found["checkpointing"]["error"] < 1e-6


@pytest.mark.parametrize("name", MAIN)
def test_eager_attention_returns_its_matrices(used: dict[str, Any], name: str) -> None:
    found = used[name]["tools"]["attentions"]
    assert found["shapes"] == [[2, 2, 24, 24]] * 2
    assert found["row_error"] < 1e-5
    assert found["future"] == 0
    assert "attn_implementation='eager'" in found["without_eager"]


@torch.no_grad()
@pytest.mark.parametrize("name", MAIN)
def test_accelerate_places_and_offloads_an_export(used: dict[str, Any], name: str) -> None:
    found = used[name]["tools"]["accelerate"]
    if found is None:
        pytest.skip("accelerate is not installed")
    for logits in found.values():
        assert relative_error(logits, byte_model(name)(TOKENS).double()) < 1e-5


@pytest.mark.parametrize("name", MAIN)
def test_peft_trains_adapters_of_every_linear_map(used: dict[str, Any], name: str) -> None:
    found = used[name]["tools"]["peft"]
    if found is None:
        pytest.skip("peft is not installed")
    assert found["adapters"] == 8  # four maps in each of two blocks
    assert found["without_gradient"] == []
    assert found["losses"][1] < found["losses"][0]
    assert found["merge_error"] < 1e-5


def test_more_beams_find_likelier_text_for_some_model(used: dict[str, Any]) -> None:
    assert any(used[name]["beam_scores"][1] > used[name]["beam_scores"][0] for name in MAIN)


@pytest.mark.parametrize("name", NAMES)
def test_an_import_has_the_same_bytes(root: Path, tmp_path: Path, name: str) -> None:
    run = Run.open(root / "runs" / folder_of(name))
    export = open_source(root / "hf" / folder_of(name))
    hf.import_run(export, tmp_path / "back")
    original, back = (
        next((path / "checkpoints").glob("*/model.safetensors")) for path in (run.path, tmp_path / "back")
    )
    assert original.read_bytes() == back.read_bytes()
    assert open_source(tmp_path / "back").training == open_source(run.path).training == export.training
    assert Run.open(tmp_path / "back").config() == run.config()
    assert open_source(tmp_path / "back").tokenizer().to_str() == load_tokenizer("bytes").to_str()
    assert export.sha256() == open_source(run.path).sha256() == open_source(tmp_path / "back").sha256()


def test_what_transformers_saved_again_can_be_used_and_imported(
    root: Path, used: dict[str, Any], tmp_path: Path
) -> None:
    """In several files, without the configuration of the run; the tokenizer gets a post-processor that adds nothing."""
    again = root / "hf" / "angpt-again"
    assert len(list(again.glob("*.safetensors"))) > 1
    hf.import_run(open_source(again), tmp_path / "back")
    tensors = load_file(next((tmp_path / "back" / "checkpoints").glob("*/model.safetensors")))
    assert tensors.keys() == byte_model().state_dict().keys()
    assert all(torch.equal(tensors[n], t) for n, t in byte_model().state_dict().items())
    assert Run.open(tmp_path / "back").config().model == byte_model().cfg
    assert json.loads((again / "tokenizer.json").read_text())["post_processor"] is not None
    texts = [
        generate_text(source.decoder(), source.tokenizer(), ["x"], 9, GREEDY)[0].text
        for source in map(open_source, (root / "runs" / "angpt", again, tmp_path / "back"))
    ]
    assert len(set(texts)) == 1


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*weight vectors miss the length")
@pytest.mark.parametrize("size", [257, 300])
@pytest.mark.parametrize("name", MAIN)
def test_a_model_whose_vocabulary_was_resized_works_and_can_be_imported(
    root: Path, tmp_path: Path, name: str, size: int
) -> None:
    shutil.copytree(root / "hf" / name, tmp_path / "hf")
    model = hf.as_transformers(byte_model(name), torch.device("cpu"), torch.float32)
    model.resize_token_embeddings(size)
    logits = model(TOKENS).logits
    assert logits.shape[-1] == size
    torch.testing.assert_close(logits[..., :257], byte_model(name)(TOKENS)[..., :257])
    model.save_pretrained(tmp_path / "hf")
    tokenizer = load_tokenizer(tmp_path / "hf")
    tokenizer.add_tokens([f"<{i}>" for i in range(size - 257)])
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    hf.import_run(open_source(tmp_path / "hf"), tmp_path / "back")
    for folder in ("hf", "back"):
        source = open_source(tmp_path / folder)
        assert len(generate_text(source.decoder(), source.tokenizer(), ["x"], 3, GREEDY)) == 1
    torch.testing.assert_close(open_source(tmp_path / "back").decoder()(TOKENS), logits)


@torch.no_grad()
def test_an_export_can_be_folded_and_exported(root: Path, tmp_path: Path) -> None:
    source = open_source(root / "hf" / "ngpt")
    assert torch.equal(source.folded()(TOKENS), fold(byte_model("ngpt"))(TOKENS))
    hf.export(source, tmp_path / "twice")
    for name in ("model.safetensors", "config.json", "run.toml", "tokenizer.json"):
        assert (tmp_path / "twice" / name).read_bytes() == (source.path / name).read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_model_in_memory_is_exported(tmp_path: Path, dtype: torch.dtype) -> None:
    load_tokenizer("bytes").save(str(tmp_path / "bytes.json"))
    model = byte_model().to(dtype)
    folder = angpt.export(model, tmp_path / "mine", tmp_path / "bytes.json")
    source = open_source(folder)
    torch.testing.assert_close(source.decoder()(TOKENS), model.float()(TOKENS))
    assert source.sha256() == source.exported_sha256
    assert len(generate_text(source.decoder(), source.tokenizer(), ["x"], 3, GREEDY)) == 1
    assert "# mine" in (folder / "README.md").read_text()
    assert model.training == byte_model().training
    with pytest.raises(UserError, match=r"a folder or a model of angpt.build, not Linear"):
        angpt.export(torch.nn.Linear(2, 2), tmp_path / "other")  # type: ignore[arg-type]


def test_a_tokenizer_that_adds_tokens_is_exported_so_that_it_adds_none(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer, corpus = load_tokenizer("bytes"), tmp_path / "text.txt"
    end = ("<|endoftext|>", 256)
    tokenizer.post_processor = TemplateProcessing(single=f"{end[0]} $A", pair="$A $B", special_tokens=[end])
    assert tokenizer.encode("ab").ids == [256, 97, 98]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    corpus.write_text("some text\n" * 99)
    prepare((str(corpus),), tmp_path / "data", tokenizer=str(tmp_path / "tokenizer.json"), val_fraction=0.5)
    run = write_run(tmp_path / "run", byte_model(), tokenizer=tokenizer)
    hf.export(open_source(run.path), tmp_path / "hf")
    assert AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=True)("ab").input_ids == [97, 98]
    hf.import_run(open_source(tmp_path / "hf"), tmp_path / "back")
    for folder in (run.path, tmp_path / "hf", tmp_path / "back"):
        assert open_source(folder).tokenizer().encode("ab", add_special_tokens=False).ids == [97, 98]
        assert evaluate(folder, data=[tmp_path / "data"])[0].losses
    shutil.copy(tmp_path / "tokenizer.json", tmp_path / "back")
    assert open_source(tmp_path / "back").tokenizer().encode("ab").ids == [97, 98]
    prepare((str(corpus),), tmp_path / "again", tokenizer=str(tmp_path / "hf"), val_fraction=0.5)
    assert evaluate(run.path, data=[tmp_path / "again"])[0].losses


def test_the_modeling_file_imports_torch_and_transformers_alone() -> None:
    tree = ast.parse(Path(hf.__file__).with_name(f"{hf.CODE}.py").read_text())
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [a.name for a in node.names] if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip
    assert imported == {"math", "typing", "torch", "transformers"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_import_warns_of_weights_that_were_trained_without_their_bound(
    root: Path, tmp_path: Path, dtype: torch.dtype, recwarn: pytest.WarningsRecorder
) -> None:
    tuned = tmp_path / "tuned"
    shutil.copytree(root / "hf" / "angpt", tuned)
    tensors = {name: t.to(dtype) for name, t in load_file(tuned / "model.safetensors").items()}
    save_file(tensors, tuned / "model.safetensors")
    hf.import_run(open_source(tuned), tmp_path / "rounded")
    assert not recwarn.list
    tensors["blocks.1.W_uz.weight"][3] *= 1.11
    save_file(tensors, tuned / "model.safetensors")
    with pytest.warns(UserWarning, match=r"by up to 0\.11; train with angpt\.integrations\.transformers\.Constrain"):
        hf.import_run(open_source(tuned), tmp_path / "back")
    back = open_source(tmp_path / "back").tensors()
    assert all(torch.equal(back[name], t.float()) for name, t in tensors.items())


def test_the_card_tells_what_is_known_of_the_run(root: Path) -> None:
    card = (root / "hf" / "angpt" / "README.md").read_text()
    for text in ("7 steps (896 tokens)", "2.5000", open_source(root / "runs" / "angpt").sha256(), "trust_remote_code"):
        assert text in card
    headings = re.findall("^## (.*)$", card, flags=re.MULTILINE)
    assert headings == ["Fine-tuning", "Data", "Evaluation", "Limitations", "Licence", "Citation"]
    assert str(root / "runs" / "angpt-data") in card
    count = int(re.search(r"\| parameters \| ([\d,]+) \|", card)[1].replace(",", ""))  # type: ignore[index]
    assert f"896 tokens, {896 / count:.3g} per parameter" in card
    assert "ConstrainCallback" in card
    assert "ConstrainCallback" not in (root / "hf" / "gpt+" / "README.md").read_text()  # nothing to constrain


def test_weights_that_were_changed_are_not_described_by_the_training_before(root: Path, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    shutil.copytree(root / "hf" / "angpt", tuned)
    assert open_source(tuned).training.val_loss == 2.5
    save_file(
        {name: t * 0.99 for name, t in load_file(tuned / "model.safetensors").items()}, tuned / "model.safetensors"
    )
    hf.export(open_source(tuned), tmp_path / "card")
    card = (tmp_path / "card" / "README.md").read_text()
    for text in ("trained for", "2.5000", "896 tokens", "Adam", str(root / "runs" / "angpt-data")):
        assert text not in card
    for folder in (tuned, tmp_path / "card"):
        training = open_source(folder).training
        assert (training.step, training.tokens, training.val_loss) == (None, None, None)
        open_source(folder).tokenizer()
    hf.import_run(open_source(tuned), tmp_path / "back")
    assert open_source(tmp_path / "back").training.val_loss is None
    hf.export(open_source(tmp_path / "back"), tmp_path / "again")
    card = (tmp_path / "again" / "README.md").read_text()
    for text in ("trained for", "It has seen", str(root / "runs" / "angpt-data")):
        assert text not in card


@torch.no_grad()
@pytest.mark.parametrize("name", [*MAIN, "angpt/scale-before-head"])
def test_the_last_hidden_state_is_what_the_head_reads(name: str) -> None:
    model = hf.as_transformers(byte_model(name), torch.device("cpu"), torch.float32)
    last = model(TOKENS, output_hidden_states=True).hidden_states[-1]
    logits = model.get_output_embeddings()(last) * (model.s_z() if hasattr(model, "s_z") else 1.0)
    torch.testing.assert_close(logits, model(TOKENS).logits)


def test_no_name_of_the_config_is_an_option_of_generate(root: Path) -> None:
    """transformers would take its value for the option."""
    from transformers import GenerationConfig

    config = json.loads((root / "hf" / "angpt" / "config.json").read_text())
    assert config.keys() & GenerationConfig().to_dict().keys() <= {*hf.TOKEN_IDS}


def test_a_model_without_tokenizer_is_exported_without(tmp_path: Path, run: Run) -> None:
    source = open_source(run.path)
    assert source.tokenizer_path is not None
    source.tokenizer_path.unlink()
    hf.export(open_source(run.path), tmp_path / "hf")
    assert not (tmp_path / "hf" / "tokenizer.json").exists()
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] is None


def test_what_cannot_be_exported_or_imported_is_refused(
    tmp_path: Path, run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(AnGPT):
        class Block(AnGPTBlock):
            def mlp(self, h: Tensor) -> Tensor:
                return torch.sin(super().mlp(h))

    with pytest.raises(UserError, match="is not an export"):
        hf.import_run(open_source(run.path), tmp_path / "back")
    with pytest.raises(UserError, match="exists"):
        hf.export(open_source(run.path), root)
    monkeypatch.setitem(variants.ARCHITECTURES, "angpt", Odd)
    with pytest.raises(UserError, match=r"does not compute what its design\(\) declares"):
        hf.export(open_source(run.path), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(store, "save_file", full)
    with pytest.raises(UserError, match="No space left on device"):
        hf.export(open_source(run.path), tmp_path / "hf")
    assert not [p for p in tmp_path.iterdir() if "hf" in p.name]


def test_a_truncated_export_is_explained(root: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(root / "hf" / "angpt", broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        hf.import_run(open_source(broken), tmp_path / "back")
    (broken / "config.json").write_text('{"model_type": "angpt"}')
    with pytest.raises(UserError, match=r"config\.json: cannot be read"):
        open_source(broken)
    assert not (tmp_path / "back").exists()
