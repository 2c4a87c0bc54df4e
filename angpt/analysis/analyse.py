"""All measurements of several runs as plain data, stored in `analysis.json`; tables and figures show nothing else."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from angpt.analysis import learned, moments, norms, robustness
from angpt.analysis.attention import AttentionProbe, LayerAttention
from angpt.analysis.factors import FactorProbe, MeasuredFactor
from angpt.analysis.history import History
from angpt.analysis.inputs import Condition, TextSource, conditions, text_batches, token_counts
from angpt.analysis.parts import PARTS, TOKENS
from angpt.analysis.probe import Probe, observe
from angpt.config import Device, Recipe, TrainConfig
from angpt.data.shards import TOKENIZER, TokenData
from angpt.data.tokenizers import were_made_with
from angpt.errors import UserError, nearest
from angpt.inference.source import Source, open_source
from angpt.present.words import label
from angpt.serialization import read_json, sealed_json
from angpt.system import write_atomically
from angpt.training import checkpoint
from angpt.training.hardware import choose_device, present
from angpt.training.plan import MICRO_TOKENS, rule_for
from angpt.training.record import RunRecord

SHIFTED = 8
"""Each kind of unusual input has 1/8 of the tokens."""

Tick = Callable[[str, int, int], None]
"""Called with progress: name of the run, tokens done, total tokens."""


@dataclass(frozen=True)
class RunAnalysis:
    """All measurements of one run. A part that was not requested or cannot be measured is None."""

    run: str
    """Name of the run folder."""
    architecture: Recipe
    seed: int
    label: str
    """Unique name in tables and figures."""
    step: int
    """Training steps of the checkpoint."""
    fingerprint: str
    """Checksum of the parameters."""
    parameters: int
    layers: int
    context: int
    tokens: int
    """Trained tokens."""
    measured_tokens: int
    """Number of validation tokens measured on, in each part that needs text."""
    loss: float | None
    """Mean loss on the measured tokens."""
    norms: norms.Norms | None
    factors: tuple[MeasuredFactor, ...] | None
    learned: learned.Learned | None
    moments: moments.Moments | None
    robustness: robustness.Robustness | None
    attention: tuple[LayerAttention, ...] | None


@dataclass(frozen=True)
class Analysis:
    runs: tuple[RunAnalysis, ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        return read_json(cls, path, "remove it and run `angpt analyze` again")

    def write(self, path: Path) -> None:
        write_atomically(path, sealed_json(self))


def analyse(
    runs: Sequence[Path],
    parts: Sequence[str] = PARTS,
    *,
    data: str | None = None,
    tokens: int = TOKENS,
    device: Device = "auto",
    sources: Mapping[Path, Source] | None = None,
    tick: Tick = lambda run, done, total: None,
) -> Analysis:
    """Measure the newest checkpoint of each run on validation text, and read what the run recorded.

    `sources` holds models that are already open, by run folder.
    """
    for part in parts:
        if part not in PARTS:
            raise UserError(f"unknown part {part!r}: {nearest(part, PARTS)}")
    if tokens < 1:
        raise UserError(f"tokens = {tokens}: at least one is needed")
    if not runs:
        raise UserError("name at least one run folder")
    resolved = [path.resolve() for path in runs]
    if twice := next((path for path in runs if resolved.count(path.resolve()) > 1), None):
        raise UserError(f"{twice}: is named twice; name each run once")
    where, sources = present(choose_device(device)), sources or {}
    records = [RunRecord.open(path) for path in runs]
    found = []
    for record, name in zip(records, labels([(record.path, record.config) for record in records]), strict=True):
        stored = sources.get(record.path) or open_source(record.path)
        found.append(analyse_run(record, stored, parts, name, data=data, tokens=tokens, device=where, tick=tick))
    return Analysis(tuple(found))


def analyse_run(
    record: RunRecord,
    stored: Source,
    parts: Sequence[str],
    name: str,
    *,
    data: str | None,
    tokens: int,
    device: torch.device,
    tick: Tick = lambda run, done, total: None,
) -> RunAnalysis:
    """Measure one run; the text passes through the model once for all parts."""
    config, state, history = record.config, state_of(stored), History.of(record.layers)
    model = stored.decoder().to(device)
    bf16, batch_tokens = device.type == "cuda", MICRO_TOKENS[device.type]
    stream, factors, attention = norms.NormProbe(len(model.blocks)), FactorProbe(), AttentionProbe()
    probes: list[Probe] = [stream] if "norms" in parts or "robustness" in parts else []
    probes += [factors] if "factors" in parts else []
    probes += [attention] if "attention" in parts else []
    source = open_text(config, data, state) if probes or "learned" in parts else None
    counts = token_counts(source.train, source.vocab_size) if source else None
    done, measured, loss, robust = 0, 0, None, None
    if source and counts is not None and probes:
        unusual = conditions(source, max(1, tokens // SHIFTED), counts) if "robustness" in parts else []
        total = max(1, tokens // source.context) * source.context
        total += sum(c.tokens[:, 1:].size for c in unusual if isinstance(c, Condition))

        def progress(count: int) -> None:
            nonlocal done
            done += count
            tick(record.path.name, done, total)

        loss = observe(model, text_batches(source, tokens, batch_tokens), probes, bf16=bf16, tick=progress)
        measured, context = done, source.context
        if "robustness" in parts:
            text = robustness.shift("text", "validation text", measured // context, context, loss, stream.stream())
            robust = robustness.compare(model, text, unusual, batch_tokens, bf16=bf16, tick=progress)
    warmup = rule_for(config.recipe).warmup if config.optimizer.warmup is None else config.optimizer.warmup
    return RunAnalysis(
        run=record.name,
        architecture=config.recipe,
        seed=config.seed,
        label=name,
        step=state.step,
        fingerprint=state.fingerprint,
        parameters=model.parameter_count(),
        layers=len(model.blocks),
        context=config.model.context,
        tokens=state.step * (config.batch_tokens or 0),
        measured_tokens=measured,
        loss=loss,
        norms=norms.collect(model, stream, history) if "norms" in parts else None,
        factors=factors.results() if "factors" in parts else None,
        learned=learned.measure(model, counts, history) if "learned" in parts else None,
        moments=moments.measure(History.of(record.moments), warmup) if "moments" in parts else None,
        robustness=robust,
        attention=attention.results() if "attention" in parts else None,
    )


def state_of(source: Source) -> checkpoint.State:
    """The training state stored with the weights of a run."""
    weights = source.weights[0]
    return checkpoint.read_state(weights if weights.is_dir() else weights.parent, verify=False)


def open_text(config: TrainConfig, data: str | None, state: checkpoint.State) -> TextSource:
    """The text of a run, or the text in `data`, which must be prepared with the same tokenizer."""
    path, vocab = data or config.data.path, config.model.vocab_size
    train, val = TokenData.open(path, "train"), TokenData.open(path, "val")
    own = Path(config.data.path) / TOKENIZER
    if not were_made_with(train, state.tokenizer_fingerprint, own if own.exists() else None):
        raise UserError(f"{path}: was prepared with another tokenizer than the run's data; choose another --data")
    for split in (train, val):
        if split.max_token >= vocab:
            raise UserError(
                f"{path}: the {split.split} split has token {split.max_token}, but the model's vocabulary has {vocab}; "
                "choose the --data that belongs to the run"
            )
    return TextSource(train, val, config.model.context, vocab, config.data.mask_documents)


def labels(runs: Sequence[tuple[Path, TrainConfig]]) -> list[str]:
    """A name for each run: its architecture, "without warm-up" if it lacks its usual one, and its folder if two runs
    would have the same name."""
    names = []
    for _, config in runs:
        name = label(config.recipe)
        without = config.optimizer.warmup == 0 and rule_for(config.recipe).warmup > 0
        names.append(f"{name} without warm-up" if without else name)
    folders = [path.resolve().name for path, _ in runs]
    if len(set(folders)) < len(folders):
        folders = [str(path) for path, _ in runs]
    return [f"{name} ({f})" if names.count(name) > 1 else name for name, f in zip(names, folders, strict=True)]
