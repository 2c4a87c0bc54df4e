"""Faults that did harm once, each with a command that shows it: what must be refused is refused in one line and changes
nothing, what must work works."""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

from angpt.data.shards import LLMC_HEADER_BYTES, LLMC_MAGIC, LLMC_VERSION
from angpt.training import checkpoint
from angpt.training.run import Run
from tests.torture.harness import BRIEF_MEMORY, CASES, Command, Limits, changes, few, run, snapshot, succeed
from tests.torture.material import CONFIG, PREPARE, STUDY, TRAIN, copied
from tests.torture.test_inputs import COMMANDS, edited
from tests.torture.test_kills import MANY, end_of, ranks

NEW = (*TRAIN, "new")
TOKENIZER = ("data", "prepare", "text", "--out", "new", "--tokenizer", "t.json")
REFUSED = [
    (*NEW, "--tokens", "9" * 400),
    (*NEW, "--data.tuning-split", "1e-9"),
    (*NEW, "--model.vocab-size", str(10**15)),
    (*NEW, "--model.d-model", str(2**40)),
    (*NEW, "--model.d-model", str(2**13)),
    (*NEW, "--model.d-ff", str(2**20)),
    (*NEW, "--batch-tokens", str(2**40)),
    (*NEW, "--batch-tokens", str(2**30)),
    (*NEW, "--timeout", "inf"),
    (*NEW, "--optimizer.lr", "inf"),
    (*NEW, "--optimizer.eps", "inf"),
    (*NEW, "--seed", str(2**63)),
    (*TRAIN, "a\nb"),
    (*TRAIN, "c.toml/x"),
    (*TRAIN, "x" * 300),
    (*TRAIN, os.fsdecode(b"\xff")),
    ("train", "--config", "text", "--out", "new"),
    ("compare", *COMMANDS["compare"], "--tune", "1000000"),
    ("compare", *COMMANDS["compare"], "--workers", "-1"),
    ("generate", "runs/a", "tree \udcff"),
    ("generate", "runs/a", "tree", "--tokens", str(10**15)),
    ("serve", "runs/a", "--port", "0", "--batch", str(2**62)),
    ("serve", "runs/a", "--port", "0", "--batch", str(2**63)),
    ("bench", "train", "32M:" + "9" * 5000),
    ("bench", "train", "--profile", "-1"),
    ("bench", "data", "data", "--context", str(2**62)),
    ("bench", "data", "data", "--sequences", str(2**62)),
    ("data", "prepare", "text", "--out", "new", "--tokenizer", "c.toml"),
    ("data", "prepare", "text", "--out", "new", "--tokenizer", "bpe:9999999999"),
    ("data", "prepare", "text", "--out", "runs", "--tokenizer", "bytes"),
    ("fit", "hparams", "text/00.txt", "--out", "new"),
    ("fit", "hparams", "sweep.csv", "--out", "new", "--write-rules", ".."),
]
"""Commands that were once accepted, or ended in a traceback."""


def is_refused(folder, command, words="", **limits):
    """A command is refused in one line that has these words, and nothing changes."""
    CASES["known faults"] += 1
    before = snapshot(folder)
    outcome = run(folder, *command, limits=Limits(memory_bytes=BRIEF_MEMORY, **limits))
    assert outcome.problem is None, outcome
    assert outcome.code == 2, outcome
    assert re.search(words, outcome.err), outcome
    assert not changes(before, snapshot(folder)), outcome


@pytest.mark.parametrize("number", few(range(len(REFUSED)), 4))
def test_commands(material, number):
    with copied(material) as folder:
        is_refused(folder, REFUSED[number])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("grid.lrs", "[0.01, 0.010001]"),
        ("grid.tune", "1000000"),
        ("shapes.x.d_model", "16"),
        ("grid.budgets", "['0']"),
        ("threads", str(2**40)),
    ],
)
def test_studies(material, key, value):
    with copied(material, "data") as folder:
        (folder / "s.toml").write_text(edited(STUDY.replace("tune = 2\n", ""), key, value))
        is_refused(folder, ("study", "plan", "s.toml"))


@pytest.mark.parametrize(
    ("name", "value"), [("WORLD_SIZE", "0"), ("WORLD_SIZE", "x"), ("WORLD_SIZE", "9" * 400), ("RANK", "-1")]
)
def test_the_environment_of_a_launcher(material, name, value):
    with copied(material, "c.toml", "data") as folder:
        is_refused(folder, NEW, name, environment={"RANK": "0", "WORLD_SIZE": "1"} | {name: value})


def test_a_rank_without_its_master_waits_as_long_as_it_is_told(material):
    there = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    with copied(material, "c.toml", "data") as folder:
        start = time.monotonic()
        is_refused(folder, (*NEW, "--timeout", "3"), "rank 1: the other ranks were not found", environment=there)
        assert time.monotonic() - start < 60


def save_tokenizer(model):
    return lambda folder: Tokenizer(model).save(str(folder / "t.json"))


def empty_llmc_file(folder):
    header = np.zeros(LLMC_HEADER_BYTES // 4, dtype="<i4")
    header[:2] = LLMC_MAGIC, LLMC_VERSION
    (folder / "raw").mkdir()
    for split in ("train", "val"):
        header.tofile(folder / "raw" / f"x_{split}_0.bin")


def replaced(name, pattern, text):
    """An edit of the first match of a pattern in a file, whose checksum is removed as in files of earlier versions."""

    def edit(folder):
        file = folder / name
        content, found = re.subn(pattern, lambda _: text, file.read_text(), count=1)
        assert found, f"{name} has no {pattern}"
        if '"checksum"' in content:
            values = json.loads(content)
            del values["checksum"]
            content = json.dumps(values)
        file.write_text(content)

    return edit


def sharded_header(rows):
    """An edit of the header of a file of a checkpoint that says which rows it has."""

    def edit(folder):
        path = folder / "runs/cut/checkpoints/step-000000010"
        state = json.loads((path / "state.json").read_text())
        del state["checksum"]
        save_file(load_file(path / "model.safetensors"), path / "model.safetensors", {"rows": rows})
        state["sha256"]["model.safetensors"] = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
        (path / "state.json").write_text(json.dumps(state))

    return edit


def weight_map(name):
    def edit(folder):
        (folder / "export/model.safetensors").rename(folder / "model.safetensors")
        index = {"metadata": {}, "weight_map": {"W_e.weight": name}}
        (folder / "export/model.safetensors.index.json").write_text(json.dumps(index))

    return edit


RESUME, INFO = ("train", "--resume", "runs/cut"), ("data", "info", "data")
GENERATE = ("generate", "export", "tree")
FILES = {
    "tokenizer without vocabulary": (save_tokenizer(models.BPE()), TOKENIZER, "no vocabulary"),
    "tokenizer without end of text": (
        save_tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
        TOKENIZER,
        "no end-of-text token",
    ),
    "tokenizer without unknown": (save_tokenizer(models.WordLevel({"</s>": 0})), TOKENIZER, "cannot encode every text"),
    "llm.c without tokens": (empty_llmc_file, (*NEW, "--data.path", "raw"), "has no tokens"),
    "token beyond the vocabulary": (lambda _: None, (*NEW, "--model.vocab-size", "100"), "model.vocab_size is 100"),
    "journal": (replaced("half/journal.log", "^.*", "[]"), (*PREPARE, "half"), "journal.log"),
    "journal, deep": (replaced("half/journal.log", "^.*", "[" * 9000), (*PREPARE, "half"), "journal.log"),
    "header of shards": (sharded_header('{"W_e.weight": 3}'), RESUME, "model.safetensors"),
    "header of shards, rows": (sharded_header('{"W_e.weight": {"shape": [9], "first_row": 7}}'), RESUME, "checkpoint"),
    "seed": (replaced("runs/cut/config.toml", "(?m)^seed = 0", "seed = 1"), RESUME, "seed = 1, not 0"),
    "beta2": (replaced("runs/cut/config.toml", "(?m)^beta2 = .*", "beta2 = 0.5"), RESUME, "beta2 = 0.5, not"),
    "shard name": (replaced("data/index.json", "train-00000.bin", "../c.toml"), INFO, "is not the name of a file"),
    "absolute shard name": (replaced("data/index.json", "train-00000.bin", "/c"), INFO, "is not the name of a file"),
    "weight map": (weight_map("../model.safetensors"), GENERATE, "is not the name of a file"),
    "absolute weight map": (weight_map("/etc/passwd"), GENERATE, "is not the name of a file"),
}


@pytest.mark.parametrize("name", few(FILES, 4))
def test_files(material, name):
    edit, command, words = FILES[name]
    with copied(material) as folder:
        edit(folder)
        is_refused(folder, command, words)


BAD_JSON = ["3", "[" * 50_000, '{"format": 1e999}', f'{{"format": {"9" * 5000}}}', '{"a": "\\ud800"}', "\0"]
READ = {
    "runs/a/summary.json": ("report", "runs/a", "--out", "new"),
    "runs/a/metrics.jsonl": ("report", "runs/a", "--out", "new"),
    "runs/a/eval/results.json": ("export", "hf", "runs/a", "--out", "new"),
    "data/index.json": INFO,
    "folded/folded.json": ("generate", "folded", "tree"),
    "export/config.json": GENERATE,
}


@pytest.mark.parametrize("file", few(READ, 3))
def test_json_of_a_wrong_kind(material, file):
    with copied(material) as folder:
        for text in few(BAD_JSON, 2):
            (folder / file).write_text(f"{text}\n")
            is_refused(folder, READ[file], re.escape(file))


@pytest.mark.parametrize("name", ["step", "metrics_bytes"])
def test_one_digit_of_a_state(material, name):
    """Its checkpoint is skipped with a warning; the end is that of an undisturbed run."""
    with copied(material, "c.toml", "data") as folder:
        succeed(folder, *NEW, "--keep-checkpoints", "9")
        file = folder / "new/checkpoints/step-000000010/state.json"
        text, found = re.subn(rf'("{name}": )\d', r"\g<1>8", file.read_text())
        assert found
        file.write_text(text)
        end = end_of(folder / "new")
        shutil.rmtree(folder / "new/checkpoints/step-000000012")
        (folder / "new/summary.json").unlink()
        outcome = succeed(folder, "train", "--resume", "new")
        assert outcome.err.startswith("warning: skipping a damaged checkpoint: new/checkpoints/step-000000010")
        assert end_of(folder / "new") == end
        CASES["known faults"] += 1


@pytest.mark.parametrize("out", few(["runs/[/x]", "runs/[bold]:smile:", "😀 漢字"], 3))
def test_names_of_runs(material, out):
    with copied(material, "c.toml", "data") as folder:
        shutil.copytree(folder / "data", folder / "[/données] 🙂")
        outcome = succeed(folder, *TRAIN, out, "--data.path", "[/données] 🙂")
        assert f"{out}: finished" in outcome.out
        assert f"{out}: finished" in succeed(folder, "train", "--resume", out).out
        assert (folder / out / "summary.json").exists()
        CASES["known faults"] += 1


def test_a_path_that_is_not_utf8(material):
    with copied(material, "c.toml", "data") as folder:
        name = os.fsdecode(b"donn\xe9es")
        shutil.copytree(folder / "data", folder / name)
        succeed(folder, *NEW, "--data.path", name)
        (folder / "new/summary.json").unlink()
        assert run(folder, "train", "--resume", "new").code == 0
        CASES["known faults"] += 1


def test_learning_rates_that_differ_in_a_late_digit(material):
    with copied(material, "data") as folder:
        grid = edited(STUDY.replace("tune = 2\n", "").replace("lr_limits = [1e-3, 1e-1]\n", ""), "grid.seeds", "[0]")
        (folder / "s.toml").write_text(edited(grid, "grid.lrs", "[0.01, 0.0100000001]"))
        outcome = run(folder, "study", "run", "s.toml", "--out", "new", "--workers", "0")
        rates = (
            [Run(path).config().optimizer.lr for path in (folder / "new/runs").glob("*")] if not outcome.code else []
        )
        assert outcome.code == 2 or sorted(rates) == [0.01, 0.01, 0.0100000001, 0.0100000001], outcome
        CASES["known faults"] += 1


def test_links(material):
    """A checkpoint that is a link does not stop saving, and nothing is written through links with known names."""
    with copied(material, "runs", "data") as folder:
        old = folder / "runs/cut/checkpoints/step-000000010"
        old.rename(folder / "elsewhere")
        old.symlink_to(folder / "elsewhere")
        (folder / "victim").write_text("precious")
        for name in ("config.toml.part", "summary.json.part", ".config.toml.part", "metrics.jsonl.part"):
            (folder / "runs/cut" / name).symlink_to(folder / "victim")
        before = snapshot(folder)
        succeed(folder, *RESUME, "--micro-batch", "2", "--keep-checkpoints", "1")
        assert not changes(before, snapshot(folder), ["runs/cut"])
        assert end_of(folder / "runs/cut")[1].keys() == end_of(folder / "runs/a")[1].keys()
        assert len(checkpoint.found(folder / "runs/cut/checkpoints")) == 1
        CASES["known faults"] += 1


@pytest.mark.parametrize("kind", few(MANY, 2))
def test_a_signal_to_the_process_group(material, kind):
    command = (*MANY[kind], "--out", "new")
    with copied(material, "s.toml", "c.toml", "data") as folder:
        process = Command(folder, command, Limits())
        while not list(folder.glob("new/runs/*/checkpoints/step-*")) and process.process.exitcode is None:
            time.sleep(0.02)
        os.killpg(process.process.pid, signal.SIGTERM)
        outcome = process.wait()
        assert outcome is not None
        assert outcome.code in (0, 3), outcome
        assert not (folder / "new/failed").exists()
        succeed(folder, *command)
        CASES["known faults"] += 1


@pytest.mark.parametrize("parallel", few(["ddp", "fsdp"], 2))
def test_divergence_on_ranks(material, parallel):
    larger = edited(edited(CONFIG, "model.d_model", "256"), "model.n_layers", "6")
    with copied(material, "data") as folder:
        (folder / "c.toml").write_text(larger)
        command = (*NEW, "--arch", "gpt+", "--parallel", parallel, "--checkpoint-every", "1", "--log-every", "1")
        command += ("--optimizer.lr", "1e20")
        ended = [process.wait() for process in ranks(folder, *command)]
        assert [outcome and outcome.code for outcome in ended] == [4, 4], ended
        found, names = Run(folder / "new").summary(), [path.name for path in (folder / "new/checkpoints").iterdir()]
        assert found.status == "diverged"
        assert found.checkpoint in names
        assert all(name.startswith("step-") for name in names)
        CASES["known faults"] += 1


def test_every_checkpoint_damaged(material):
    """Not silently begun anew."""
    rng = random.Random(0)
    with copied(material, "runs", "data") as folder:
        for path in checkpoint.found(folder / "runs/cut/checkpoints"):
            content = bytearray((path / "model.safetensors").read_bytes())
            content[rng.randrange(len(content))] ^= 1
            (path / "model.safetensors").write_bytes(content)
        is_refused(folder, RESUME, "every checkpoint is damaged")
