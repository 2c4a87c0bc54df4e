import json
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from angpt.analysis.parts import PARTS
from angpt.training.launch import start
from angpt.training.reporter import Quiet
from tests.command import angpt
from tests.studies.conftest import compare

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("analysis") / "out"
    command = ["analyze", *map(str, runs.values()), "--tokens", "256", "--out", str(out)]
    done = subprocess.run([sys.executable, "-m", "angpt", *command], capture_output=True, text=True, check=True)
    return out, done.stdout


CHARTS = ("input-norms", "row-norms", "norms", "gamma", "bound", "factors", "learned", "logit-scales", "moments",
          "robustness", "attention")  # fmt: skip


def test_json_markdown_and_figures_are_written(written):
    out, _ = written
    found = json.loads((out / "analysis.json").read_text())
    assert [r["label"] for r in found["runs"]] == ["GPT+", "GPT+ without warm-up", "nGPT", "anGPT"]
    assert all(r[part] is not None for r in found["runs"] for part in PARTS)
    page = (out / "analysis.md").read_text()
    for name in CHARTS:
        assert f"(figures/{name}.png)" in page
        assert (out / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert len((out / "figures" / f"{name}.csv").read_text().splitlines()) > 2
    assert "Made by `angpt analyze " in page
    assert page.count("\n| ") > 60
    assert "NaN" not in (out / "analysis.json").read_text()


def test_the_terminal_shows_the_same_tables_uncut(written):
    out, shown = written
    page = (out / "analysis.md").read_text()
    assert "…" not in shown
    titles = re.findall(r"^\*\*(.*)\*\*$", page, flags=re.MULTILINE)
    assert len(titles) == 10
    for title in titles:
        assert title in shown
    for row in re.findall(r"^\| (maps: .*) \|$", page, flags=re.MULTILINE):
        assert " ".join(row.replace("|", " ").split()) in " ".join(shown.split())
    assert str(out / "analysis.md") in shown


def test_parts_alone(capsys, runs, tmp_path):
    code, out = angpt(
        capsys, "analyze", runs["angpt"], "--parts", "attention", "--tokens", 64, "--out", tmp_path / "out"
    )
    assert code == 0
    assert "Rows of the attention matrices" in out
    assert "Learned parameters" not in out
    assert {p.stem for p in (tmp_path / "out" / "figures").iterdir()} == {"attention"}
    assert "--parts attention" in (tmp_path / "out" / "analysis.md").read_text()


def test_one_run_per_architecture_of_a_comparison_is_measured(capsys, tokens, tmp_path):
    study = compare(tokens, tmp_path / "study", architectures=("gpt+", "angpt"))
    study.begin(None, "angpt compare", on_this_machine=True)
    code, text = angpt(capsys, "analyze", study.folder)
    assert code == 2
    assert "no run has started yet" in text
    for job in study.jobs():
        start(job.config, job.folder, Quiet())
    code, text = angpt(capsys, "analyze", study.folder, "--parts", "learned")
    assert code == 0
    assert str(study.folder / "analysis" / "analysis.md") in text
    found = json.loads((study.folder / "analysis" / "analysis.json").read_text())
    assert [r["run"] for r in found["runs"]] == ["gpt+-4.096k-s0", "angpt-4.096k-s0"]


@pytest.mark.slow
def test_ctrl_c_stops_without_a_traceback_and_without_half_a_result(runs, tmp_path):
    command = [sys.executable, "-m", "angpt", "analyze", str(runs["angpt"]), "--tokens", "100000000",
               "--data", str(long_text(tmp_path)), "--out", str(tmp_path / "out")]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # fmt: skip
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=8)  # it measures, or still imports: both must stop
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in out
    assert not (tmp_path / "out").exists()


def long_text(folder):
    for split in ("train", "val"):
        np.random.default_rng(0).integers(61, size=20_000_000).astype("<u2").tofile(folder / f"{split}.bin")
    return folder


def test_the_toy_examples_need_no_run(capsys, tmp_path):
    code, _ = angpt(capsys, "analyze", "--parts", "toy", "--out", tmp_path)
    assert code == 0
    assert {p.name for p in (tmp_path / "figures").glob("*.png")} == {"toy-preconditioning.png", "toy-residual.png"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "name run folders, or the folder of a study"),
        (("/nowhere",), "/nowhere: no run folder"),
        (("RUN", "--parts", "nroms"), "unknown part 'nroms': did you mean norms"),
        (("RUN", "--parts"), "--parts needs at least one of norms"),
        (("RUN", "--data", "/nowhere"), "/nowhere: no such file or folder"),
        (("RUN", "--tokens", "-5"), "tokens = -5: at least one is needed"),
        (("RUN", "--tokens", "many"), "many"),
        (("RUN", "--device", "gpu"), "--device: 'gpu' is not one of auto, cpu, cuda"),
        (("RUN", "--out", "FILE"), "is a file; choose another --out"),
    ],
)
def test_mistakes_exit_with_2_and_no_traceback(capsys, runs, tmp_path, args, message):
    (tmp_path / "file").write_text("")
    replace = {"RUN": runs["angpt"], "FILE": tmp_path / "file"}
    code, text = angpt(
        capsys, "analyze", *(replace.get(a, a) for a in args), *(() if "--out" in args else ("--out", tmp_path))
    )
    assert code == 2
    assert message in text
    assert "Traceback" not in text


def test_a_folder_that_cannot_be_written_to(capsys, runs, tmp_path):
    (tmp_path / "file").write_text("")
    code, text = angpt(capsys, "analyze", runs["angpt"], "--parts", "learned", "--out", tmp_path / "file" / "below")
    assert code == 2
    assert "cannot be written" in text


def test_moments_need_records_of_them(capsys, runs, tmp_path):
    quiet = tmp_path / "quiet"
    shutil.copytree(runs["angpt"], quiet)
    lines = (quiet / "metrics.jsonl").read_text().splitlines(keepends=True)
    (quiet / "metrics.jsonl").write_text("".join(line for line in lines if '"moments"' not in line))
    code, text = angpt(capsys, "analyze", quiet, "--parts", "moments", "--out", tmp_path / "out")
    assert (code, "train with --record-moments" in text) == (2, True)
    assert not (tmp_path / "out").exists()
