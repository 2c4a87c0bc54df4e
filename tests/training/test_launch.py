import dataclasses
import re
import shutil

import numpy as np
import pytest
import torch

from angpt.errors import UserError
from angpt.operations import kernels_enabled
from angpt.serialization import sealed_json, to_toml
from angpt.training import checkpoint
from angpt.training.launch import resume, start
from angpt.training.plan import make_plan
from angpt.training.reporter import Quiet
from angpt.training.run import Run
from tests.command import angpt
from tests.training.conftest import Stops, parameters, small


def test_a_finished_run_is_not_extended(data, tmp_path, capsys):
    start(small(data), tmp_path / "run", Quiet())
    before = parameters(Run.open(tmp_path / "run"))
    code, text = angpt(capsys, "train", "--resume", tmp_path / "run", "--tokens", "1M", "--seed", "3")
    assert code == 2
    assert "a run cannot be resumed with other values of tokens, seed" in text
    assert angpt(capsys, "train", "--resume", tmp_path / "run")[0] == 0
    assert parameters(Run.open(tmp_path / "run")) == before


def test_a_finished_run_says_so_without_its_data(data, tmp_path, capsys):
    start(small(shutil.copytree(data, tmp_path / "data")), tmp_path / "run", Quiet())
    shutil.rmtree(tmp_path / "data")
    assert angpt(capsys, "train", "--resume", tmp_path / "run")[0] == 0


def test_a_config_file_repeats_a_run(data, tmp_path, capsys):
    start(small(data), tmp_path / "one", Quiet())
    assert angpt(capsys, "train", "--config", tmp_path / "one" / "config.toml", "--out", tmp_path / "two")[0] == 0
    assert parameters(Run.open(tmp_path / "one")) == parameters(Run.open(tmp_path / "two"))
    assert (tmp_path / "one" / "config.toml").read_text() == (tmp_path / "two" / "config.toml").read_text()


def test_overrides_and_presets(data, tmp_path, capsys):
    args = (
        "train",
        "--preset",
        "laptop",
        "--data.path",
        data,
        "--tokens",
        "1k",
        "--model.context",
        "32",
        "--arch",
        "ngpt",
    )
    args += ("--batch-tokens", "128", "--model.n-layers", "1", "--eval-tokens", "64", "--out", tmp_path / "run")
    assert angpt(capsys, *args)[0] == 0
    config = Run.open(tmp_path / "run").config()
    assert (config.model.architecture, config.model.d_model, config.model.n_layers) == ("ngpt", 96, 1)


def mistakes(data, tmp_path):
    """What is wrong, and what is said about it. Each with a folder that must not be touched."""
    start(small(data, "ngpt"), tmp_path / "ngpt", Quiet())
    start(small(data), tmp_path / "run", Stops(5))
    swapped = tmp_path / "swapped"
    shutil.copytree(tmp_path / "run", swapped)
    shutil.rmtree(swapped / "checkpoints")
    shutil.copytree(tmp_path / "ngpt" / "checkpoints", swapped / "checkpoints")
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path / "run", moved)
    other = tmp_path / "other"
    shutil.copytree(data, other)
    np.arange(3000, dtype="<u2").__mod__(60).astype("<u2").tofile(other / "train.bin")
    (moved / "config.toml").write_text((moved / "config.toml").read_text().replace(str(data), str(other)))
    tiny_vocab = tmp_path / "v.toml"
    tiny_vocab.write_text(to_toml(small(data, model__vocab_size=50)))
    fine = tmp_path / "fine.toml"
    fine.write_text(to_toml(small(data)))
    short = tmp_path / "short"
    short.mkdir()
    for name in ("train.bin", "val.bin"):
        (short / name).write_bytes((data / name).read_bytes()[:61])
    broken = tmp_path / "broken.toml"
    broken.write_text(to_toml(small(short)))
    gone = tmp_path / "gone.toml"
    gone.write_text(to_toml(small(tmp_path / "nowhere")))
    new = tmp_path / "new"
    return {
        "exists; continue with": ("--config", fine, "--out", tmp_path / "run"),
        "the checkpoint has another architecture (ngpt) than the run (angpt)": ("--resume", swapped),
        "the checkpoint has another data": ("--resume", moved),
        "has token 60, but model.vocab_size is 50; set it to 61 or more": ("--config", tiny_vocab, "--out", new),
        "no such file or folder; `angpt data prepare` makes one": ("--config", gone, "--out", new),
        "are not a sequence of uint16 tokens": ("--config", broken, "--out", new),
        "no run folder": ("--resume", tmp_path / "nothing"),
        "nothing.toml: does not exist": ("--config", tmp_path / "nothing.toml"),
        "unknown size 'lapotp': did you mean laptop": ("--preset", "lapotp"),
        "give one of them": ("--preset", "laptop", "--config", fine),
    }


REMEMBERED = (".lock", ".verified.json")
"""Files that say which process was there, and that tokens have been verified."""


def test_mistakes_exit_with_2_and_touch_nothing(data, tmp_path, capsys):
    cases = mistakes(data, tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name not in REMEMBERED}
    for message, args in cases.items():
        code, text = angpt(capsys, "train", *args)
        assert code == 2, (message, text)
        assert re.sub(r"\s+", " ", message) in text, (message, text)
        assert "Traceback" not in text
    after = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name not in REMEMBERED}
    assert before == after


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_and_nothing_written(data, tmp_path):
    with pytest.raises(UserError, match="no GPU"):
        start(small(data, device="cuda"), tmp_path / "run", Quiet())
    assert not (tmp_path / "run").exists()


def test_two_processes_do_not_train_in_one_folder(data, tmp_path):
    start(small(data), tmp_path / "run", Stops(5))
    run = Run.open(tmp_path / "run")
    with run.lock(), pytest.raises(UserError, match="another process is training here"):
        resume(run.path, Quiet())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model__context": 4096, "batch_tokens": 4096, "micro_batch": 1}, "too few for one window"),
        ({"data__mask_documents": True}, "raw tokens do not say where documents end"),
        ({"wandb": True}, "wandb is not installed"),
        ({"data__tuning_split": 1e-9}, "tuning_split = 1e-09 of 5,000 tokens leaves a part without tokens"),
    ],
)
def test_what_would_stop_a_run_is_found_before_its_folder_is_made(data, tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        start(small(data, **overrides), tmp_path / "run", Quiet())
    assert not any(tmp_path.iterdir())


def test_a_run_folder_has_no_line_break_in_its_name(data, tmp_path):
    with pytest.raises(UserError, match="has control characters in its name; choose another --out"):
        start(small(data), tmp_path / "a\nb", Quiet())
    assert not any(tmp_path.iterdir())


def test_the_file_of_a_run_does_not_carry_its_rates_to_another_architecture(data, tmp_path, capsys):
    start(small(data, "angpt"), tmp_path / "one", Quiet())
    config = tmp_path / "one" / "config.toml"
    assert angpt(capsys, "train", "--config", config, "--arch", "gpt+", "--out", tmp_path / "two")[0] == 0
    assert (
        Run.open(tmp_path / "two").config().optimizer
        == make_plan(small(data, "gpt+", optimizer__lr=None)).config.optimizer
    )
    given = Run.open(tmp_path / "one").config().optimizer
    options = ("--lr", given.lr, f"--optimizer.weight-decay={given.weight_decay}", "--optimizer.warmup", given.warmup)
    call = ("train", "--config", config, "--arch", "gpt+", *options, "--out", tmp_path / "given")
    assert angpt(capsys, *call)[0] == 0
    assert Run.open(tmp_path / "given").config().optimizer == given  # although they are those of the file
    code, text = angpt(capsys, "train", "--resume", tmp_path / "one", "--out", tmp_path / "three")
    assert code == 2
    assert "leave out --out" in text


def test_a_run_goes_on_with_moved_data_and_other_records(data, tmp_path, capsys):
    start(small(data), tmp_path / "whole", Quiet())
    start(small(data), tmp_path / "run", Stops(5))
    moved = shutil.copytree(data, tmp_path / "moved")
    options = ["--data.path", moved, "--keep-checkpoints", "1", "--log-every", "2", "--eval-every", "4"]
    options += ["--layers-every", "0", "--checkpoint-every", "3", "--micro-batch", "8", "--kernels", "off"]
    code, text = angpt(capsys, "train", "--resume", tmp_path / "run", *options)
    assert code == 0, text
    run, whole = Run.open(tmp_path / "run"), Run.open(tmp_path / "whole")
    config = run.config()
    assert (config.data.path, config.keep_checkpoints, config.kernels) == (str(moved), 1, "off")
    assert (config.log_every, config.eval_every, config.layers_every, config.checkpoint_every) == (2, 4, 0, 3)
    assert len(list(run.checkpoints.iterdir())) == 1
    losses = [[r["loss"] for r in each.records() if r["kind"] == "train"] for each in (run, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # another micro-batch adds up in another order


@pytest.mark.parametrize(
    "option",
    [
        "--eval-tokens 256",
        "--record-moments",
        "--data.tuning-split 0.1",
        "--precision bf16",
        "--optimizer.lr 1",
        "--reduce fp32",
    ],
)
def test_what_would_change_the_numbers_is_refused(data, tmp_path, capsys, option):
    start(small(data), tmp_path / "run", Stops(5))
    before = (tmp_path / "run" / "config.toml").read_text()
    code, text = angpt(capsys, "train", "--resume", tmp_path / "run", *option.split())
    assert code == 2
    assert option.split()[0].removeprefix("--").replace("-", "_") in text
    assert (tmp_path / "run" / "config.toml").read_text() == before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("seed", "0", "1"), ("optimizer.beta2", "0.95", "0.96"), ("model.rotary_base", "10000.0", "10000.5")],
)
def test_a_run_is_not_resumed_with_an_edited_configuration(data, tmp_path, capsys, name, old, new):
    run = tmp_path / "run"
    start(small(data), run, Stops(5))
    text = (run / "config.toml").read_text()
    key = name.rpartition(".")[2]
    edited = text.replace(f"\n{key} = {old}\n", f"\n{key} = {new}\n")
    assert edited != text
    (run / "config.toml").write_text(edited)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    code, said = angpt(capsys, "train", "--resume", run)
    assert code == 2
    assert "config.toml: differs from what step-00000000" in said
    assert f"was trained with ({name} = {new}, not {old}); restore it" in said
    assert angpt(capsys, "generate", run)[0] == 2
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"} == before
    (run / "config.toml").write_text(text.replace("log_every = 3", "log_every = 4"))
    assert resume(run, Quiet()).status == "finished"


def test_a_run_is_not_resumed_on_other_data(data, tmp_path, capsys):
    start(small(data), tmp_path / "run", Stops(5))
    before = (tmp_path / "run" / "config.toml").read_text()
    for file, what in {"train.bin": "data", "val.bin": "validation split"}.items():
        other = shutil.copytree(data, tmp_path / what)
        (other / file).write_bytes((other / file).read_bytes()[:-2])
        code, text = angpt(capsys, "train", "--resume", tmp_path / "run", "--data.path", other)
        assert code == 2
        assert f"the checkpoint has another {what} (" in text
    assert (tmp_path / "run" / "config.toml").read_text() == before


def test_an_imported_run_is_not_resumed(data, tmp_path):
    start(small(data), tmp_path / "run", Stops(5))
    path = checkpoint.newest(tmp_path / "run" / "checkpoints")
    state = dataclasses.replace(checkpoint.read_state(path), data_fingerprint="")
    (path / checkpoint.STATE).write_text(sealed_json(state))
    with pytest.raises(UserError, match="was imported, without the state of an optimizer, so that it"):
        resume(tmp_path / "run", Quiet())


def test_kernels_are_off_while_a_run_says_so(data, tmp_path):
    seen = []

    class Looks(Quiet):
        def train(self, step, loss, tokens_per_s):
            seen.append(kernels_enabled())

    for kernels in ("off", "auto"):
        start(small(data, tokens="512", kernels=kernels), tmp_path / kernels, Looks())
    assert seen == [False, True]
    assert kernels_enabled()
