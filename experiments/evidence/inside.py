"""What is measured of a trained model before its weights are removed: norms and factors, tasks, the cost of 8 bits."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

from angpt.config import Weights
from angpt.evaluation.results import RESULTS, SCORES, read_results
from angpt.training.run import Run
from experiments.evidence import paper
from experiments.evidence.items import Item

FORMS: tuple[Weights, ...] = get_args(Weights)
"""Formats of the matrices of folded models that are compared: they differ in nothing else."""


def measured(item: Item) -> list[Path]:
    """Files, in the folder of a run, with what its model is measured for."""
    forms = ("", *FORMS) if item.quantized else ("",)
    files = [Path("analysis.json")] if item.analysed else []
    return files + ([form / RESULTS for form in map(Path, forms)] if item.evaluated else [])


def is_measured(path: Path) -> bool:
    """True if a file of `measured` is there with all that belongs to it: of results, every task or its scores, since
    the loss is written first."""
    if not path.exists() or path.name != RESULTS.name:
        return path.exists()
    folder = path.parents[1]
    scored = {task for task in paper.TASKS if any((folder / SCORES).glob(f"{task}-*.safetensors"))}
    missing = {*paper.TASKS} - scored
    return not missing or ((found := read_results(folder)) is not None and all(map(found.task, missing)))


def look_inside(item: Item, folder: Path, requests: Path | None) -> bool:
    """Analyse the model of a run (analysis.json) and score requests of tasks, and the validation file, (eval/) with it
    and, if the item says so, with its folded forms (full/eval/, fp8/eval/, int8/eval/).

    What is there already is not done again. What fails is named, and costs neither the run nor the rest. Returns True
    if nothing failed."""
    from angpt.analysis.analyse import analyse

    data = Path(Run(folder).config().data.path)
    steps: dict[Path, Callable[[], None]] = {
        Path("analysis.json"): lambda: analyse([folder]).write(folder / "analysis.json")
    }
    if requests is not None:
        steps[RESULTS] = partial(score, folder, data, requests)
        steps |= {Path(weights) / RESULTS: partial(score_folded, folder, weights, data, requests) for weights in FORMS}
    done = True
    for file in measured(item):
        if is_measured(folder / file):
            continue
        try:
            steps[file]()
        except Exception as error:
            done = False
            print(f"{folder}: {file}: not measured: {type(error).__name__}: {error}", flush=True)
    return done


def score(model: Path, data: Path, requests: Path) -> None:
    from angpt.evaluation.evaluate import evaluate

    evaluate([model], data=[data], requests=requests)


def score_folded(run: Path, weights: Weights, data: Path, requests: Path) -> None:
    """Score the folded form of a run in a folder inside the run, and remove its weights."""
    from angpt.inference import store
    from angpt.inference.fold import fold
    from angpt.inference.quantize import quantize
    from angpt.inference.source import open_source

    source, folder = open_source(run), run / weights
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    model = fold(source.decoder())
    model = model if weights == "full" else quantize(model, weights)
    try:
        store.save(folder, model, source.path, source.sha256(), source.training, source.tokenizer_path)
        score(folder, data, requests)
    finally:
        for file in folder.glob("*.*"):
            file.unlink()
