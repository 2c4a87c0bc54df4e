"""The command `angpt eval`."""

from pathlib import Path
from typing import Annotated

import tyro

from angpt.config import Device, Precision
from angpt.errors import UserError
from angpt.present.terminal import terminal


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
    """Evaluate models and compare them: loss, perplexity and bits per byte on prepared data, and the tasks of the
    paper's table by lm-evaluation-harness, 0-shot.

    angpt eval runs/a runs/b                            loss on their own data

    angpt eval runs/a --data data/stdlib                on any prepared folder

    angpt eval runs/a runs/b --data path/to/benchmarks  the seven tasks, local

    angpt eval runs/a --tasks paper                     the same from the hub

    PIQA, ARC-Easy, HellaSwag, WinoGrande and MMLU show acc, LAMBADA perplexity, WikiText word_perplexity. Results, with
    all other metrics of the harness, go to eval/results.json in the folder of each model, and `angpt report` shows
    them. After an interruption, the same command continues with the current task; existing results of the same weights
    are kept (delete eval/ to compute them again). On a machine with several GPUs, each evaluates a share of the models.

    For a GPU without network or lm-eval, in three steps:

    angpt eval runs/a --data path/to/benchmarks --write-requests requests

    angpt eval runs/a --requests requests        there: leaves scores in runs/a/eval

    angpt eval runs/a --data path/to/benchmarks  here, with runs/a/eval: metrics

    Args:
        models: Run folders, folded models, exports.
        data: Prepared folders, and a folder of benchmarks (docs/evaluation.md shows its layout).
        tasks: piqa arc_easy hellaswag lambada_openai wikitext winogrande mmlu, also arc_challenge; or paper: the first
            seven, which is also the default for a folder of benchmarks.
        limit: Use only this many samples of each task (each subject of MMLU), or windows of prepared data.
        tokenizer: A tokenizer.json, if that of the training data cannot be found.
        write_requests: Write the tokenized requests of the tasks to this folder, and stop.
        requests: Score the requests in this folder, without lm-eval, and stop.
        device: cpu, cuda, or auto: cuda if available.
        precision: Precision of matrix products: fp32, bf16, or auto: bf16 on a GPU.
        batch_tokens: Tokens per forward pass; lower it if memory runs out. 65,536 on a GPU and 8,192 on the CPU unless
            given.
    """
    if not models and write_requests is None:
        raise UserError("name a run folder, a folded model or an export: angpt eval runs/NAME")
    if write_requests is not None and requests is not None:
        raise UserError("--write-requests makes requests and --requests scores them; give one of the two")
    from angpt.evaluation import evaluate as evaluation
    from angpt.evaluation.results import show
    from angpt.evaluation.spread import command_line, evaluate_parts, own_part
    from angpt.evaluation.subjects import open_subject
    from angpt.evaluation.tasks import PAPER, choose

    prepared, benchmarks = sort_data(data)
    chosen = choose(tasks or (PAPER if benchmarks or write_requests else ()))
    console = terminal()
    display = evaluation.Display(console)
    settings = evaluation.Settings.choose(device, precision, batch_tokens, limit)
    subjects = [open_subject(path) for path in models]
    harness = evaluation.Harness(benchmarks, limit, display)
    if write_requests is not None:
        evaluation.write_requests(write_requests, chosen, harness, evaluation.one_tokenizer(subjects, tokenizer))
        return
    files = None if requests is None else evaluation.read_requests(requests, chosen if tasks else None)
    part = own_part(subjects)
    if part is None:
        arguments = command_line(
            models, data=data, tasks=tasks, limit=limit, tokenizer=tokenizer, requests=requests, device=device,
            precision=precision, batch_tokens=batch_tokens,
        )  # fmt: skip
        evaluate_parts(settings.device, len(models), arguments)
    results = []
    for subject in subjects if part is None else part:
        evaluator = evaluation.Evaluator(subject, settings, display)
        folders = prepared
        if not folders and not chosen and files is None:
            if subject.data is None:
                raise UserError(f"{subject.path}: its training data is unknown; name data with --data or --tasks")
            folders = [subject.data]
        for folder in folders:
            evaluator.loss(folder)
        if files is not None:
            for file in files:
                evaluator.score(file)
        elif chosen:
            evaluation.evaluate_tasks(evaluator, chosen, harness, subject.tokenizer(tokenizer))
        results.append(evaluator.results)
    if part is not None:
        return
    if files is not None:
        display.note("scored; for the metrics, give --data or --tasks instead of --requests where lm-eval is installed")
    if any(r.losses or r.tasks for r in results):
        show(results, console)


def sort_data(paths: tuple[Path, ...]) -> tuple[list[Path], Path | None]:
    """The prepared folders, and the folder of benchmarks, if any."""
    from angpt.evaluation.tasks import is_benchmarks

    benchmarks = [path for path in paths if path.is_dir() and is_benchmarks(path)]
    if len(benchmarks) > 1:
        raise UserError(f"{benchmarks[0]} and {benchmarks[1]} both hold benchmarks; give one of them")
    return [path for path in paths if path not in benchmarks], next(iter(benchmarks), None)
