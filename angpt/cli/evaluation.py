"""The command `angpt eval`: what to evaluate on, then call the library and print."""

from pathlib import Path
from typing import Annotated

import tyro

from angpt.config import Device, Precision
from angpt.errors import UserError


def evaluate(
    models: Annotated[tuple[Path, ...], tyro.conf.Positional] = (),
    data: tuple[Path, ...] = (),
    tasks: tuple[str, ...] = (),
    limit: int | None = None,
    tokenizer: str | None = None,
    write_requests: Path | None = None,
    requests: Path | None = None,
    device: Device = "auto",
    precision: Precision = "auto",
    batch_tokens: int | None = None,
) -> None:
    """How good models are, side by side: loss, perplexity and bits per byte on prepared data, and the tasks of the
    paper's table through lm-evaluation-harness, without examples (0-shot).

    angpt eval runs/a runs/b                            loss on their own data

    angpt eval runs/a --data data/stdlib                on any prepared folder

    angpt eval runs/a runs/b --data path/to/benchmarks  the seven tasks, local

    angpt eval runs/a --tasks paper                     the same from the hub

    PIQA, ARC-Easy, HellaSwag, WinoGrande and MMLU show acc, LAMBADA perplexity, WikiText word_perplexity. Results go to
    eval/results.json in the folder of each model, with everything else that the harness reports, and into the page
    of `angpt report`. Stopped at any moment, the same command goes on with the task that was under way; what is known
    of the same weights is not computed again (delete eval/ to have it so). On a machine with several GPUs, each
    evaluates a part of the models.

    For a GPU without network or lm-eval, in three steps:

    angpt eval runs/a --data path/to/benchmarks --write-requests requests

    angpt eval runs/a --requests requests        there: leaves scores in runs/a/eval

    angpt eval runs/a --data path/to/benchmarks  here, with runs/a/eval: metrics

    Args:
        models: Run folders, folded models, exports.
        data: Prepared folders, and a folder of benchmarks (docs/evaluation.md shows its layout).
        tasks: piqa arc_easy hellaswag lambada_openai wikitext winogrande mmlu, also arc_challenge; or paper: the first
            seven, which is what a folder of benchmarks means unless tasks are given.
        limit: For a quick look: only so many samples of each task (each subject of MMLU), or windows of prepared data.
        tokenizer: A tokenizer.json, where that of the training data is not to be found.
        write_requests: Write the tokenized requests of the tasks into this folder, and stop.
        requests: Score the requests in this folder, without lm-eval, and stop.
        device: cpu, cuda, or auto: cuda where there is one.
        precision: Of matrix products: fp32, bf16, or auto: bf16 on a GPU.
        batch_tokens: Tokens of one forward pass; lower it if memory runs out. 65,536 on a GPU and 8,192 on the CPU
            unless given.
    """
    if not models and write_requests is None:
        raise UserError("name a run folder, a folded model or an export: angpt eval runs/NAME")
    if write_requests is not None and requests is not None:
        raise UserError("--write-requests makes requests and --requests scores them; give one of the two")
    from rich.console import Console

    from angpt.evaluation.evaluate import (
        Display,
        Evaluator,
        Harness,
        How,
        evaluate_tasks,
        one_tokenizer,
        read_requests,
    )
    from angpt.evaluation.evaluate import write_requests as write
    from angpt.evaluation.results import show
    from angpt.evaluation.spread import evaluate_parts, gpus, own_part
    from angpt.evaluation.subjects import open_subject
    from angpt.evaluation.tasks import PAPER, choose

    prepared, benchmarks = sort_data(data)
    chosen = choose(tasks or (PAPER if benchmarks or write_requests else ()))
    console = Console()
    display = Display(console)
    how = How.choose(device, precision, batch_tokens, limit)
    subjects = [open_subject(path) for path in models]
    harness = Harness(benchmarks, limit, display)
    if write_requests is not None:
        write(write_requests, chosen, harness, one_tokenizer(subjects, tokenizer))
        return
    files = None if requests is None else read_requests(requests, chosen if tasks else None)
    part = own_part(subjects)
    if part is None:
        evaluate_parts(min(gpus(how.device), len(subjects)))
    results = []
    for subject in subjects if part is None else part:
        evaluator = Evaluator(subject, how, display)
        folders = prepared
        if not folders and not chosen and files is None:
            if subject.data is None:
                raise UserError(f"{subject.path}: say what to evaluate on, with --data or --tasks")
            folders = [subject.data]
        for folder in folders:
            evaluator.loss(folder)
        if files is not None:
            for file in files:
                evaluator.score(file)
        elif chosen:
            evaluate_tasks(evaluator, chosen, harness, subject.tokenizer(tokenizer))
        results.append(evaluator.results)
    if part is not None:
        return
    if files is not None:
        display.note("scored; where lm-eval is, the same command with --data or --tasks in place of --requests goes on")
    if any(r.losses or r.tasks for r in results):
        show(results, console)


def sort_data(paths: tuple[Path, ...]) -> tuple[list[Path], Path | None]:
    """Prepared folders, and the folder of benchmarks."""
    from angpt.evaluation.tasks import is_benchmarks

    benchmarks = [path for path in paths if path.is_dir() and is_benchmarks(path)]
    if len(benchmarks) > 1:
        raise UserError(f"{benchmarks[0]} and {benchmarks[1]} both hold benchmarks; give one of them")
    return [path for path in paths if path not in benchmarks], next(iter(benchmarks), None)
