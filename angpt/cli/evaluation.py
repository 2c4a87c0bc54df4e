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

    For example:
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
        angpt eval runs/a --requests requests        there: scores in runs/a/eval
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
        batch_tokens: Tokens per forward pass; lower it if memory runs out. 64k on a GPU and 8k on the CPU unless given.
    """
    if not models and write_requests is None:
        raise UserError("name a run folder, a folded model or an export: angpt eval runs/NAME")
    if write_requests is not None and requests is not None:
        raise UserError("--write-requests makes requests and --requests scores them; give one of the two")
    from angpt.evaluation import evaluate as evaluation
    from angpt.evaluation.results import show
    from angpt.evaluation.spread import own_part

    if write_requests is not None:
        _write_requests(write_requests, models, data, tasks, limit, tokenizer)
        return
    results = evaluation.evaluate(
        models, data=data, tasks=tasks, limit=limit, tokenizer=tokenizer, requests=requests, device=device,
        precision=precision, batch_tokens=batch_tokens, progress=True,
    )  # fmt: skip
    if own_part(results) is not None:  # the process that the user started shows all
        return
    if requests is not None:
        terminal().print(
            "scored; for the metrics, give --data or --tasks instead of --requests where lm-eval is installed"
        )
    if any(r.losses or r.tasks for r in results):
        show(results, terminal())


def _write_requests(
    folder: Path,
    models: tuple[Path, ...],
    data: tuple[Path, ...],
    tasks: tuple[str, ...],
    limit: int | None,
    tokenizer: str | None,
) -> None:
    """Write the requests of tasks, tokenized for the models."""
    from angpt.evaluation.evaluate import Display, Harness, one_tokenizer, sort_data
    from angpt.evaluation.evaluate import write_requests as write
    from angpt.evaluation.subjects import open_subject
    from angpt.evaluation.tasks import PAPER, choose

    harness = Harness(sort_data(data)[1], limit, Display(progress=True))
    chosen = choose(tasks or PAPER)
    write(folder, chosen, harness, one_tokenizer([open_subject(path) for path in models], tokenizer))
