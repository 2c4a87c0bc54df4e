"""Configuration as typed, frozen dataclasses. Every field carries its own documentation, which `--help` shows."""

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from angpt.errors import UserError, nearest

T = TypeVar("T")
Device = Literal["auto", "cpu", "cuda"]
Parallel = Literal["auto", "ddp", "fsdp"]
Precision = Literal["auto", "fp32", "bf16"]
Step = Literal["auto", "plain", "kernels", "compiled"]
"""How a decode step is computed. plain: one PyTorch operation after the other. kernels: five hand-written kernels per
layer, for few rows in bf16 on a GPU. compiled: by torch.compile, which takes a minute or so before the first token.
auto: kernels where they apply, plain otherwise."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model: which architecture, how large, and the constants that the paper leaves open."""

    architecture: Annotated[str, tyro.conf.arg(aliases=["--arch"])] = "angpt"
    """gpt+, ngpt, angpt, or a variant such as angpt/no-lerp."""
    d_model: int = 256
    """Width of the residual stream, d_m."""
    n_layers: int = 6
    """Number of blocks (attention and MLP), L."""
    n_heads: int = 4
    """Attention heads; d_h = d_m / heads."""
    d_ff: int | None = None
    """Width of the MLP, d_f; 4 · d_m unless given."""
    vocab_size: int = 50_304
    """Rows of the embedding and of the head."""
    context: int = 2048
    """Longest sequence in tokens."""
    rotary_fraction: float = 0.5
    """Part of each head's dimensions that is rotated."""
    rotary_base: float = 10_000.0
    """Base of the rotary frequencies."""
    g_init: float | None = None
    """Start of the learned attention scale g; sqrt(d_h) unless given."""
    alpha_init: float = 0.05
    """Start of the interpolation weights α (nGPT, anGPT)."""
    stored_scale: float | None = None
    """Stored scale of α, s_qk and s_z; 0.01 for anGPT and 1/sqrt(d_m) for nGPT unless given."""
    nu_p: float | None = None
    """Factor of the attention output map (anGPT); sqrt(d_h/d_m) unless given. A no-op in exact arithmetic."""
    nu_acf: float = 3.74
    """Factor of the activation (anGPT), as the paper quotes it. A no-op in exact arithmetic."""

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "n_heads", "vocab_size", "context"):
            _require(getattr(self, name) > 0, f"model.{name} must be positive, not {getattr(self, name)}")
        _require(self.d_ff is None or self.d_ff > 0, f"model.d_ff must be positive, not {self.d_ff}")
        _require(
            self.d_model % self.n_heads == 0,
            f"model.n_heads = {self.n_heads} does not divide model.d_model = {self.d_model}",
        )
        _require(0 <= self.rotary_fraction <= 1, f"model.rotary_fraction must be in [0, 1], not {self.rotary_fraction}")
        rotary = self.rotary_fraction * self.d_head
        _require(
            rotary == int(rotary) and int(rotary) % 2 == 0,
            f"model.rotary_fraction = {self.rotary_fraction} of a head of {self.d_head} gives {rotary:g} rotary "
            "dimensions; they are rotated in pairs, so it must be an even whole number",
        )
        for name in ("rotary_base", "g_init", "alpha_init", "stored_scale", "nu_p", "nu_acf"):
            value = getattr(self, name)
            _require(
                value is None or (value > 0 and math.isfinite(value)),
                f"model.{name} must be positive and finite, not {value}",
            )

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads

    @property
    def d_mlp(self) -> int:
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def rotary_dim(self) -> int:
        return int(self.rotary_fraction * self.d_head)

    @property
    def g_start(self) -> float:
        """q and k have length 1, so q·k varies by 1/sqrt(d_h); the default brings it back to 1."""
        return math.sqrt(self.d_head) if self.g_init is None else self.g_init

    @classmethod
    def size(cls, name: str, **overrides: Any) -> Self:
        """A model of the paper by its name, such as 32M or 0.5B."""
        if name not in SIZES:
            raise UserError(f"unknown model size {name!r}: {nearest(name, SIZES)}")
        d_model, n_layers, n_heads = SIZES[name]
        return from_dict(cls, {"d_model": d_model, "n_layers": n_layers, "n_heads": n_heads} | overrides)


SIZES: dict[str, tuple[int, int, int]] = {
    "32M": (256, 6, 4),
    "62M": (384, 10, 6),
    "125M": (512, 18, 8),
    "250M": (768, 18, 12),
    "0.5B": (1024, 24, 16),
    "1B": (1280, 36, 20),
}
"""d_model, n_layers, n_heads of the models of the paper."""


@dataclass(frozen=True)
class DataConfig:
    """What is trained on."""

    path: str = "data/stdlib"
    """Folder made by `angpt data prepare`, or a folder or file of nanoGPT's or llm.c's .bin."""
    mask_documents: bool = False
    """Keep attention inside of each document; otherwise windows cross them, as in the paper."""
    tuning_split: float = 0.0
    """Hold out this last part of the training tokens and evaluate on it, so that no choice is made on the validation
    split."""

    def __post_init__(self) -> None:
        _require(0 <= self.tuning_split < 1, f"data.tuning_split must be in [0, 1), not {self.tuning_split}")


@dataclass(frozen=True)
class PrepareConfig:
    """How text is prepared: tokenized, and split into train and val."""

    tokenizer: str | None = None
    """A tokenizer.json (or a folder with one), bytes, bpe:N (trained on the text), or a name on the hub.
    EleutherAI/gpt-neox-20b unless given; bpe:2048 for stdlib."""
    column: str = "text"
    """Column that holds the text, in .jsonl, .parquet and data sets of the hub."""
    subset: str | None = None
    """Configuration of a data set of the hub."""
    hub_split: str | None = None
    """Split of a data set of the hub to read, instead of its train and validation splits."""
    val_fraction: float | None = None
    """Fraction of the documents held out if the data has no validation split of its own; 0.01 unless given, 0.05 for
    stdlib."""
    seed: int = 0
    """Seed of the choice of held-out documents."""
    workers: int | None = None
    """Threads that tokenize; one per core unless given. The result does not depend on it."""

    def __post_init__(self) -> None:
        _require(self.workers is None or self.workers >= 1, f"workers must be at least 1, not {self.workers}")
        held_out = self.val_fraction
        _require(held_out is None or 0 < held_out < 1, f"val_fraction must be between 0 and 1, not {held_out}")


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam, with decoupled weight decay on matrices, and its schedule: warm-up, then a cosine."""

    lr: float | None = None
    """Peak learning rate; by the rule for the size (training/rules.toml) unless given."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-9
    """Added to the root of the second moment."""
    weight_decay: float | None = None
    """Of matrices; 0.1 for GPT+ and none for nGPT and anGPT unless given."""
    warmup: float | None = None
    """Part of the steps with a rising rate; 0.1 for GPT+ and none for nGPT and anGPT unless given."""
    final_lr: float = 0.01
    """Where the cosine ends, as a part of the peak."""
    clip: float = 1.0
    """Largest norm of the whole gradient."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "clip"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"optimizer.{name} must be positive, not {value}")
        for name in ("warmup", "final_lr", "weight_decay"):
            value = getattr(self, name)
            _require(value is None or 0 <= value <= 1, f"optimizer.{name} must be in [0, 1], not {value}")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"optimizer.{name} must be in [0, 1), not {value}")


@dataclass(frozen=True)
class TrainConfig:
    """One training run. What is left open is decided at its start and written to the run's config.toml."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    tokens: str = "20x"
    """Budget: a number such as 100M or 2e9, or a multiple of the parameter count such as 20x."""
    batch_tokens: int | None = None
    """Tokens per step over all devices; by the rule for the size (training/rules.toml) unless given."""
    micro_batch: int | None = None
    """Sequences per forward pass on one device, 32k tokens on a GPU and 4k on the CPU unless given; gradients of a step
    are summed over as many as it takes. Of several devices, each takes the largest number up to this that divides its
    share of the step."""
    parallel: Parallel = "auto"
    """How several processes (torchrun, --slurm) share one run. ddp: each has the whole model; fsdp: matrices are shared
    out over them, and gathered block by block to compute. auto: ddp."""
    shard_ranks: int | None = None
    """fsdp: processes over which one copy of the matrices is shared out; all unless given. On many machines, the GPUs
    of one machine: then only gradients go between machines."""
    reduce: Literal["bf16", "fp32"] = "bf16"
    """Precision in which gradients that were computed in bf16 are summed over processes. Sums of several passes are
    always in fp32."""
    recompute: bool = False
    """Compute blocks again in the backward pass rather than keep what they computed: less memory, a third more work."""
    kernels: Literal["auto", "off"] = "auto"
    """off: everything on plain PyTorch, no hand-written kernels, compiler passes or CUDA graphs."""
    timeout: float = 900.0
    """Seconds without progress after which several processes give up, and name the one that stands still."""
    seed: int = 0
    """Of the start of the model and the order of the data."""
    device: Device = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    precision: Precision = "auto"
    """bf16: matrix products in bf16, parameters in fp32. auto: bf16 on a GPU, fp32 on the CPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile. auto: on a GPU."""
    eval_every: int | None = None
    """Steps between evaluations; a tenth of the run unless given. The last step is always evaluated."""
    eval_tokens: int = 1_048_576
    """Validation tokens per evaluation, spread over the split, the same ones each time (all, where there are fewer)."""
    log_every: int = 10
    """Steps between looks at the losses, when they are written and checked; the device runs free in between."""
    layers_every: int | None = None
    """Steps between records of each layer (input norm, α, row norms); a fiftieth of the run unless given, 0: never."""
    record_moments: bool = False
    """Also record the variance of Adam's first moment for each matrix, every 10 steps or 200 times in a long run."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; a tenth of the run unless given. One is always written at the end."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay."""
    tensorboard: bool = False
    """Also write TensorBoard events to the run folder."""
    wandb: bool = False
    """Also send metrics to Weights & Biases."""

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "micro_batch", "eval_every", "eval_tokens", "log_every", "checkpoint_every"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"{name} must be positive, not {value}")
        _require(self.keep_checkpoints > 0, f"keep_checkpoints must be positive, not {self.keep_checkpoints}")
        _require(self.layers_every is None or self.layers_every >= 0, "layers_every must not be negative")
        _require(self.shard_ranks is None or self.shard_ranks > 0, "shard_ranks must be positive")
        _require(
            self.shard_ranks is None or self.parallel == "fsdp",
            f"shard_ranks = {self.shard_ranks} shares out matrices; give parallel = 'fsdp' with it",
        )
        _require(self.timeout > 0, f"timeout must be positive, not {self.timeout}")
        _require(0 <= self.seed < 2**63, f"seed must not be negative or over 2⁶³, not {self.seed}")
        parse_budget(self.tokens, parameters=10**9)


MACHINE_SETTINGS = ("micro_batch", "parallel", "shard_ranks", "recompute", "timeout", "kernels")
"""Settings that follow from the machines of a run. They change its numbers by rounding at most."""
RESUME_SETTINGS = (
    *MACHINE_SETTINGS,
    "data.path",
    "eval_every",
    "log_every",
    "layers_every",
    "checkpoint_every",
    "keep_checkpoints",
    "tensorboard",
    "wandb",
)
"""Settings that may change when a run is resumed: the losses of its steps stay what they would have been. Data may have
moved, since its fingerprint is compared with that of the checkpoint; the others say when and where records are written.
Not among them: `eval_tokens`, which the validation loss is a mean over, and `record_moments`, whose records are summed
over a whole run."""


def differences(one: TrainConfig, two: TrainConfig, ignored: Sequence[str] = MACHINE_SETTINGS) -> list[str]:
    """Dotted names of the settings that differ, but for those that are ignored."""
    return [name for name in _differences(dataclasses.asdict(one), dataclasses.asdict(two)) if name not in ignored]


def _differences(one: dict[str, Any], two: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in one.items():
        if isinstance(value, dict):
            found += _differences(value, two[key], f"{prefix}{key}.")
        elif value != two[key]:
            found.append(prefix + key)
    return found


def parse_budget(text: str, parameters: int) -> int:
    """A token budget in tokens: "100M", "2e9", "1_000_000", or "20x", twenty times the number of parameters."""
    match = re.fullmatch(r"([0-9]+(?:_[0-9]+)*\.?[0-9]*(?:[eE]\+?[0-9]{1,2})?)\s*([kKmMbBxX]?)", text.strip())
    _require(match is not None, f"tokens = {text!r} is no budget; write a number (100M, 2e9) or a multiple (20x)")
    assert match is not None
    unit = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "x": parameters}[match[2].lower()]
    budget = round(float(match[1]) * unit)
    _require(budget > 0, f"tokens = {text!r} must be positive")
    return budget


PRESETS: dict[str, dict[str, Any]] = {
    "laptop": {
        "model": {"d_model": 96, "n_layers": 3, "n_heads": 3, "vocab_size": 2048, "context": 128},
        "tokens": "600k",
        "batch_tokens": 2048,
        "eval_tokens": 24_576,
    },
    **{
        name: {"model": {"d_model": d, "n_layers": layers, "n_heads": heads}}
        for name, (d, layers, heads) in SIZES.items()
    },
}
"""Named starting points of `angpt train`: minutes on two CPU cores, and the models of the paper."""


def preset(name: str) -> TrainConfig:
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}: {nearest(name, PRESETS)}")
    return from_dict(TrainConfig, PRESETS[name])


def toml_values(path: Path) -> dict[str, Any]:
    """The values of a TOML file; errors name the file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: cannot be read as TOML ({error})") from error


def read_toml(cls: type[T], path: Path) -> T:
    """A dataclass from a TOML file; errors name the file."""
    values = toml_values(path)
    try:
        return from_dict(cls, values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def read_json(cls: type[T], path: Path, version: int, advice: str) -> T:
    """A dataclass from a JSON file whose `format` is `version`; errors name the file and end with `advice`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != version:
            raise UserError(f"it has format {values['format']!r}, this version reads format {version}")
        return from_dict(cls, values)
    except (UserError, OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {advice}") from error


def to_toml(config: Any, prefix: str = "") -> str:
    """A dataclass as TOML: values first, then a table for each nested dataclass or dictionary, and an array of tables
    for a tuple of dataclasses. None is left out."""
    items = (
        config if isinstance(config, dict) else {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    )
    values: list[str] = []
    tables: list[str] = []
    for name, value in items.items():
        key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)
        if dataclasses.is_dataclass(value) or isinstance(value, dict):
            tables.append(f"\n[{prefix}{key}]\n{to_toml(value, f'{prefix}{key}.')}")
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            tables += [f"\n[[{prefix}{key}]]\n{to_toml(item, f'{prefix}{key}.')}" for item in value]
        elif value is not None:
            # JSON writes strings, numbers, booleans and lists of them as TOML does, but for infinity.
            text = json.dumps(list(value) if isinstance(value, tuple) else value)
            values.append(f"{key} = {'inf' if text == 'Infinity' else text}\n")
    return "".join(values + tables)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def from_dict(cls: type[T], values: dict[str, Any], where: str = "") -> T:
    """A dataclass from plain values (of a TOML file, say); nested tables become nested dataclasses.

    An unknown key or a value of the wrong type is an error that names the key as written, `where` included.
    """
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    types = get_type_hints(cls)
    arguments = {}
    for key, value in values.items():
        path = f"{where}.{key}" if where else key
        if key not in fields:
            raise UserError(f"unknown key {path!r}: {nearest(key, fields)}")
        arguments[key] = _convert(types[key], value, path)
    return cls(**arguments)


def _convert(kind: Any, value: Any, path: str) -> Any:
    """`value` as the annotated type, or an error that names `path`. An int is welcome where a float is expected."""
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for option in options:
        origin = get_origin(option)
        if dataclasses.is_dataclass(option):
            if isinstance(value, dict):
                return from_dict(option, value, path)  # type: ignore[arg-type]
        elif origin is Literal:
            if value in get_args(option):
                return value
        elif origin is tuple:
            if isinstance(value, list | tuple):
                return tuple(_convert(get_args(option)[0], v, f"{path}[{i}]") for i, v in enumerate(value))
        elif origin is dict:
            if isinstance(value, dict):
                return {key: _convert(get_args(option)[1], v, f"{path}.{key}") for key, v in value.items()}
        elif option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        elif isinstance(value, option) and isinstance(value, bool) == (option is bool):
            return value
    if dataclasses.is_dataclass(get_args(kind)[0] if get_origin(kind) is tuple else None):
        raise UserError(f"{path} must be a list of tables, each under [[{path}]]")
    raise UserError(f"{path} must be {' or '.join(_words(options))}, not {value!r}")


def _words(options: tuple[Any, ...]) -> list[str]:
    """What a value may be, for an error message."""
    plain = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    words: list[str] = []
    for option in options:
        if get_origin(option) is Literal:
            words += [repr(v) for v in get_args(option)]
        elif get_origin(option) is tuple:
            words.append("a list")
        elif option is not NoneType:
            words.append(plain.get(option, "a table"))
    return words
