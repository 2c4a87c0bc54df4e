"""Small models, tokenizers and benchmarks in the layout of the real ones."""

import dataclasses
import os
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch

from angpt.config import DataConfig, ModelConfig, TrainConfig
from angpt.data.shards import TokenData
from angpt.evaluation.scoring import Model
from angpt.evaluation.subjects import of_decoder
from angpt.evaluation.tasks import TASKS
from angpt.models.decoder import Decoder
from angpt.models.variants import build
from angpt.training import checkpoint
from angpt.training.run import Run

BENCHMARKS = Path(os.environ.get("ANGPT_BENCHMARKS", Path(__file__).parents[3] / "shared" / "benchmarks"))

SUBJECTS = {"anatomy": "stem", "philosophy": "humanities", "sociology": "social_sciences", "virology": "other"}
"""One of each group."""

SAMPLES = {"piqa": 7, "arc_easy": 6, "arc_challenge": 5, "hellaswag": 6, "lambada_openai": 8, "wikitext": 4,
           "winogrande": 7, "mmlu": 12}  # fmt: skip

WORDS = ["stone", "the", "a", "of", "naïve", "tree", "runs", "under", "Ω", "water", "slowly", "bird", "and", "then"]

CONFIG = ModelConfig(architecture="angpt", d_model=16, n_layers=2, n_heads=2, vocab_size=261, context=48)


def small_decoder(seed: int = 0, **changes: Any) -> Decoder:
    return build(dataclasses.replace(CONFIG, **changes), seed).eval()


def small_model(seed: int = 0, **changes: Any) -> Model:
    return of_decoder(small_decoder(seed, **changes), torch.float32)


def small_run(path: Path, data: Path, seed: int = 0, config: ModelConfig = CONFIG, step: int = 5) -> Path:
    """A run folder as training leaves it, with random weights."""
    run = Run(path) if path.exists() else Run.create(path, TrainConfig(model=config, data=DataConfig(path=str(data))))
    fingerprint = TokenData.open(data, "val").tokenizer_fingerprint
    state = checkpoint.State(step, config.architecture, 0, 1.0, None, "", fingerprint, {}, run.config())
    checkpoint.save(run.checkpoints, build(config, seed).state_dict(), {}, state, keep=1)
    return path


def write_benchmarks(folder: Path) -> Path:
    """Questions of random words; the counts are those of SAMPLES."""
    rng = random.Random(0)

    def text(low: int, high: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)

    def times(task: str) -> range:
        return range(SAMPLES[task])

    def options(count: int, high: int) -> list[str]:
        return [text(1, high) for _ in range(count)]

    write(
        "piqa/validation",
        [{"goal": text(3, 9), "sol1": text(1, 3), "sol2": text(1, 3), "label": i % 2} for i in times("piqa")],
    )
    for name in ("arc_easy", "arc_challenge"):
        choices = [{"text": options(4, 3), "label": list("ABCD")} for _ in times(name)]
        write(
            f"{name}/test",
            [{"question": text(3, 9), "choices": c, "answerKey": "ABCD"[i % 4]} for i, c in enumerate(choices)],
        )
    scene = {"activity_label": "Walking", "ctx_a": "A bird runs.", "ctx_b": "the tree"}
    write(
        "hellaswag/validation",
        [{**scene, "ind": i, "endings": options(4, 4), "label": str(i % 4)} for i in times("hellaswag")],
    )
    write("lambada_openai/test", [{"text": text(4, 12)} for _ in times("lambada_openai")])
    write("wikitext2/test", [{"page": f" = {text(1, 2)} = \n {text(1, 60)} .\n"} for _ in times("wikitext")])
    names = {"option1": "stone", "option2": "bird"}
    write(
        "winogrande/validation",
        [{**names, "sentence": f"the _ {text(1, 3)}.", "answer": str(1 + i % 2)} for i in times("winogrande")],
    )
    for subject in SUBJECTS:
        for split, count in (("test", SAMPLES["mmlu"] // len(SUBJECTS)), ("dev", 2)):
            rows = [{"question": text(2, 4), "choices": options(4, 2), "answer": i % 4} for i in range(count)]
            write(f"mmlu/{subject}/{split}", rows)
    return folder


def small_tasks() -> dict[str, Any]:
    """The table of tasks with the counts of the small benchmarks."""
    return {name: dataclasses.replace(task, samples=SAMPLES[name]) for name, task in TASKS.items()}
