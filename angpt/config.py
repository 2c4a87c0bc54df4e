"""Configuration as typed, frozen dataclasses. Every field carries its own documentation, which `--help` shows."""

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Annotated, Any, Literal, Self

import tyro

from angpt.errors import UserError, nearest
from angpt.serialization import INTEGERS, check_settings, check_types, from_dict, shown

Device = Literal["auto", "cpu", "cuda"]
Parallel = Literal["auto", "ddp", "fsdp"]
Precision = Literal["auto", "fp32", "bf16"]
TrainPrecision = Literal["auto", "fp32", "bf16", "fp8"]
Step = Literal["auto", "plain", "kernels", "compiled"]
"""How prompts are read and a decode step is computed. plain: PyTorch operations. kernels: hand-written kernels, in bf16
or fp16 on a GPU. compiled: torch.compile, which takes about a minute before the first token. auto: kernels where they
support the model, otherwise plain."""
Weights = Literal["full", "fp8", "int8"]
"""Matrices of a folded model: full, in the precision of the products; fp8 (e4m3) or int8, with a scale per row."""
LEAST, MOST = 1e-30, 1e30
"""Limits of factors and rates, which fp32 holds."""
BETWEEN = f"between {LEAST:g} and {MOST:g}"
MOST_DIMENSIONS, MOST_LAYERS = 2**26, 10_000
"""Largest dimensions of a model, far above those that can be trained: with larger ones, sizes of tensors overflow."""
MOST_SECONDS = 1e7
"""Longest timeout, 116 days."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model: its architecture, its size, and constants that the paper leaves open."""

    architecture: Annotated[str, tyro.conf.arg(aliases=["--arch"])] = "angpt"
    """gpt+, ngpt, angpt, or a variant such as angpt/no-lerp, in any case."""
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
    context: Annotated[int, tyro.conf.arg(aliases=["--context"])] = 2048
    """Longest sequence in tokens."""
    rotary_fraction: float = 0.5
    """Fraction of each head's dimensions that is rotated."""
    rotary_base: float = 10_000.0
    """Base of the rotary frequencies."""
    g_init: float | None = None
    """Initial value of the learned attention scale g; √d_h unless given."""
    alpha_init: float = 0.05
    """Initial value of the interpolation weights α (nGPT, anGPT)."""
    stored_scale: float | None = None
    """Initial stored value of α, s_qk and s_z; 0.01 for anGPT and 1/√d_m for nGPT unless given."""
    nu_p: float | None = None
    """Factor of the attention output map (anGPT); √(d_h/d_m) unless given. A norm after the block cancels it."""
    nu_acf: float = 3.74
    """Factor of the activation (anGPT), as the paper quotes it. A norm after the block cancels it."""

    def __post_init__(self) -> None:
        check_types(self, "model.")
        object.__setattr__(self, "architecture", self.architecture.lower())
        sizes = ("d_model", "n_heads", "vocab_size", "context", "d_ff")
        within = f"positive and at most {MOST_DIMENSIONS:,}"
        check_settings(self, within, lambda value: 0 < value <= MOST_DIMENSIONS, *sizes, prefix="model.")
        within = f"positive and at most {MOST_LAYERS:,}"
        check_settings(self, within, lambda value: 0 < value <= MOST_LAYERS, "n_layers", prefix="model.")
        d, heads = self.d_model, self.n_heads
        if d % heads:
            raise UserError(f"model.n_heads = {heads} does not divide model.d_model = {d}")
        check_settings(self, "in [0, 1]", lambda value: 0 <= value <= 1, "rotary_fraction", prefix="model.")
        rotary = self.rotary_fraction * self.d_head
        if rotary % 2:
            raise UserError(
                f"model.rotary_fraction = {self.rotary_fraction} of a head of {self.d_head} gives {rotary:g} rotary "
                "dimensions; they are rotated in pairs, so it must be an even whole number"
            )
        constants = ("rotary_base", "g_init", "alpha_init", "stored_scale", "nu_p", "nu_acf")
        check_settings(self, BETWEEN, lambda value: LEAST <= value <= MOST, *constants, prefix="model.")

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
        """Initial g. q and k have length 1, so q·k has standard deviation 1/sqrt(d_h); the default makes it 1."""
        return math.sqrt(self.d_head) if self.g_init is None else self.g_init

    @property
    def stored_start(self) -> float:
        """Initial stored value of α, s_qk and s_z: the paper's for anGPT, that of nGPT's authors for nGPT."""
        if self.stored_scale is not None:
            return self.stored_scale
        return 1 / math.sqrt(self.d_model) if self.architecture.startswith("ngpt") else 0.01

    @property
    def nu_p_value(self) -> float:
        return math.sqrt(self.d_head / self.d_model) if self.nu_p is None else self.nu_p

    def resolved(self) -> Self:
        """The same model with values for the settings that are None."""
        derived: dict[str, Any] = {
            "d_ff": self.d_mlp,
            "g_init": self.g_start,
            "stored_scale": self.stored_start,
            "nu_p": self.nu_p_value,
        }
        return dataclasses.replace(self, **{n: value for n, value in derived.items() if getattr(self, n) is None})

    def without_derived_of(self, other: Self) -> Self:
        """The same model, with settings set to None that have the values which were derived for `other`.

        The config.toml of a run states derived settings (d_ff, g_init, …); another model must derive its own.
        """
        names = ("d_ff", "g_init", "stored_scale", "nu_p")
        nothing: dict[str, Any] = dict.fromkeys(names)
        implied = dataclasses.replace(other, **nothing).resolved()
        same = [n for n in names if getattr(self, n) == getattr(other, n) == getattr(implied, n)]
        return dataclasses.replace(self, **{name: nothing[name] for name in same})

    @classmethod
    def size(cls, name: str, **overrides: Any) -> Self:
        """A model by its name: laptop, or a size of the paper such as 32M or 0.5B."""
        return from_dict(cls, PRESETS[size_name(name)]["model"] | overrides)


DIMENSIONS = ("d_model", "n_layers", "n_heads")
SIZES: dict[str, tuple[int, int, int]] = {
    "32M": (256, 6, 4),
    "62M": (384, 10, 6),
    "125M": (512, 18, 8),
    "250M": (768, 18, 12),
    "0.5B": (1024, 24, 16),
    "1B": (1280, 36, 20),
}
"""DIMENSIONS of the models of the paper."""


@dataclass(frozen=True)
class DataConfig:
    """The training data."""

    path: Annotated[str, tyro.conf.arg(aliases=["--data"])] = "data/stdlib"
    """Folder made by `angpt data prepare`, or a folder or file of .bin tokens of nanoGPT or llm.c."""
    mask_documents: bool = False
    """Keep attention inside each document; otherwise it crosses documents, as in the paper."""
    tuning_split: float = 0.0
    """Fraction of the training tokens, at their end, to hold out and evaluate on instead of the validation split."""

    def __post_init__(self) -> None:
        check_types(self, "data.")
        check_settings(self, "in [0, 1)", lambda value: 0 <= value < 1, "tuning_split", prefix="data.")


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
    """Fraction of documents to hold out if the data has no validation split; 0.01 unless given, 0.05 for stdlib."""
    seed: int = 0
    """Seed of the choice of held-out documents."""
    workers: int | None = None
    """Threads that tokenize; one per core unless given. The result does not depend on it."""

    def __post_init__(self) -> None:
        check_types(self)
        check_settings(self, "at least 1", lambda value: value >= 1, "workers")
        check_settings(self, "between 0 and 1", lambda value: 0 < value < 1, "val_fraction")


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, with decoupled weight decay of matrices, and the schedule of its rate: warm-up, then a cosine."""

    name: Annotated[Literal["adam", "muon"], tyro.conf.arg(aliases=["--optimizer"])] = "adam"
    """muon: Muon on the matrices of the blocks, Adam on embedding, head and vectors."""
    lr: Annotated[float | None, tyro.conf.arg(aliases=["--lr"])] = None
    """Peak learning rate, with muon that of Muon; from the rule for the model (training/rules.toml) unless given."""
    adam_lr: float | None = None
    """muon: peak learning rate of Adam; from the rule for the model unless given."""
    momentum: float = 0.95
    """muon: decay of the first moment in Muon."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-9
    """Added to the root of the second moment."""
    weight_decay: float | None = None
    """Weight decay of matrices; for GPT+ 0.1, with muon 0.25, and for nGPT and anGPT 0 unless given."""
    warmup: float | None = None
    """Fraction of the steps that warm up; for GPT+ 0.1, with muon 0.03, and for nGPT and anGPT 0 unless given."""
    final_lr: float = 0.01
    """Learning rate at the end, as a fraction of the peak."""
    clip: float = 1.0
    """Largest norm of the gradient; longer ones are clipped."""

    def __post_init__(self) -> None:
        check_types(self, "optimizer.")
        check_settings(self, BETWEEN, lambda value: LEAST <= value <= MOST, "lr", "adam_lr", "eps", prefix="optimizer.")
        check_settings(self, "positive", lambda value: value > 0, "clip", prefix="optimizer.")
        fractions = ("warmup", "final_lr", "weight_decay")
        check_settings(self, "in [0, 1]", lambda value: 0 <= value <= 1, *fractions, prefix="optimizer.")
        decays = ("beta1", "beta2", "momentum")
        check_settings(self, "in [0, 1)", lambda value: 0 <= value < 1, *decays, prefix="optimizer.")

    @property
    def given_for_muon(self) -> list[str]:
        """The settings without effect on Adam alone that differ from their defaults."""
        return [name for name in MUON_SETTINGS if getattr(self, name) != getattr(OptimizerConfig, name)]


MUON_SETTINGS = {"adam_lr": "lr", "momentum": "beta1"}
"""Settings of `OptimizerConfig` that only Muon has, each with its counterpart for Adam alone."""


Recipe = str
"""An architecture or variant, followed by `:muon` if Muon trains it: gpt+, angpt:muon, angpt/no-lerp:muon."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Settings that are None are chosen at its start and written to the run's config.toml."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    tokens: str = "20x"
    """Token budget: a number such as 100M or 2e9, or a multiple of the parameter count such as 20x."""
    batch_tokens: Annotated[int | None, tyro.conf.arg(aliases=["--batch"])] = None
    """Tokens per step over all devices; from the rule for the model's size (training/rules.toml) unless given."""
    micro_batch: int | None = None
    """Sequences per forward pass on one device (gradient accumulation); 32k tokens on a GPU and 4k on the CPU unless
    given. With several devices it is lowered to a divisor of each device's share of the step."""
    parallel: Parallel = "auto"
    """How several processes (torchrun, --slurm) share one run. ddp: each has the whole model; fsdp: matrices are
    sharded, and gathered block by block to compute. auto: ddp."""
    shard_ranks: int | None = None
    """fsdp: processes over which one copy of the matrices is sharded; all unless given. With the number of GPUs of one
    machine, only gradients are sent between machines."""
    reduce: Literal["bf16", "fp32"] = "bf16"
    """Precision in which bf16 gradients are summed over processes. Gradient accumulation is always in fp32."""
    recompute: bool = False
    """Recompute the activations of blocks in the backward pass: less memory, a third more computation."""
    kernels: Literal["auto", "off"] = "auto"
    """off: everything on plain PyTorch, no hand-written kernels, compiler passes or CUDA graphs."""
    timeout: float = 900.0
    """Seconds without progress after which several processes stop and name the rank that hangs."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""
    device: Device = "auto"
    """cpu, cuda, or auto: cuda if there is a GPU."""
    precision: TrainPrecision = "auto"
    """bf16: matrix products in bf16, parameters in fp32. fp8: products of blocks in 8 bits (docs/fp8.md), all else as
    with bf16. auto: bf16 on a GPU, fp32 on the CPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile. auto: on a GPU."""
    eval_every: int | None = None
    """Steps between evaluations; a tenth of the run unless given. The last step is always evaluated."""
    eval_tokens: int = 1_048_576
    """Validation tokens per evaluation, spread evenly over the split, the same each time; all if there are fewer."""
    log_every: int = 10
    """Steps between reads of the losses from the device, which are then logged and checked."""
    layers_every: int | None = None
    """Steps between records of each layer (input norm, α, row norms); a fiftieth of the run unless given; 0: never."""
    record_moments: bool = False
    """Also record the variance of the first moment of each matrix, every 10 steps or 200 times in a long run."""
    record_fp8: bool = False
    """With precision fp8, and as often as layers: also record the shares of saturated numbers and of those that became
    zero, and the kurtosis, of the inputs and output gradients of each matrix."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; a tenth of the run unless given. One is always written at the end."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep."""
    tensorboard: bool = False
    """Also write TensorBoard events to the run folder."""
    wandb: bool = False
    """Also send metrics to Weights & Biases."""

    def __post_init__(self) -> None:
        check_types(self)
        sizes = ("batch_tokens", "micro_batch", "eval_tokens", "keep_checkpoints", "shard_ranks")
        check_settings(self, "positive", lambda value: value > 0, *sizes, "eval_every", "log_every", "checkpoint_every")
        within = f"positive and at most {MOST_SECONDS:,.0f}"
        check_settings(self, within, lambda value: 0 < value <= MOST_SECONDS, "timeout")
        check_settings(self, "0 or more", lambda value: value >= 0, "layers_every")
        check_settings(self, "in [0, 2⁶³)", lambda value: 0 <= value < 2**63, "seed")
        if self.shard_ranks is not None and self.parallel != "fsdp":
            raise UserError(f"shard_ranks = {self.shard_ranks} shards matrices, which needs parallel = 'fsdp'")
        if self.record_fp8 and self.precision != "fp8":
            raise UserError(f"record_fp8 records products in 8 bits, but precision = {self.precision!r}; set it to fp8")
        parse_budget(self.tokens, parameters=10**9)

    @property
    def recipe(self) -> Recipe:
        name = self.optimizer.name
        return self.model.architecture if name == "adam" else f"{self.model.architecture}:{name}"

    def with_recipe(self, recipe: Recipe) -> Self:
        """The same settings with the architecture and the optimizer of a recipe; with Adam without those of Muon."""
        architecture, colon, optimizer = recipe.lower().partition(":")
        if colon and (optimizer != "muon" or not architecture):
            base = architecture or "angpt"
            raise UserError(f"{recipe!r}: write {base}, which Adam trains, or {base}:muon")
        model = dataclasses.replace(self.model, architecture=architecture)
        changes = {"name": "muon"} if colon else {n: getattr(OptimizerConfig, n) for n in ("name", *MUON_SETTINGS)}
        return dataclasses.replace(self, model=model, optimizer=dataclasses.replace(self.optimizer, **changes))

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """The same configuration with other values of some settings, by dotted names: {"optimizer.lr": 0.01}.

        With another architecture or optimizer, learning rates, warm-up and decay are chosen anew unless given.
        """
        return self._with(settings).without_choices_of(self, settings)

    def _with(self, settings: Mapping[str, Any]) -> Self:
        values, known = dataclasses.asdict(self), settings_of(self)
        for name, value in settings.items():
            if name not in known:
                raise UserError(f"unknown setting {name!r}: {nearest(name, known)}")
            *tables, key = name.split(".")
            functools.reduce(getitem, tables, values)[key] = value
        return from_dict(type(self), values)

    def without_choices_of(self, other: Self, given: Collection[str] = ()) -> Self:
        """The same configuration with what was chosen for `other` left open: settings of the model that its dimensions
        imply, and, with another architecture or optimizer, learning rates, warm-up and decay. Settings whose dotted
        names are in `given` stay."""
        changed = dataclasses.replace(self, model=self.model.without_derived_of(other.model))
        if self.recipe != other.recipe:
            changed = changed.without_rates_of(other)
        return changed._with({name: value for name, value in settings_of(self).items() if name in given})

    def without_rates_of(self, other: Self) -> Self:
        """The same configuration with learning rates, warm-up and decay left open where they are those of `other`."""
        ours, theirs = self.optimizer, other.optimizer
        names = ["lr", "adam_lr", "warmup", "weight_decay", *(["momentum"] if ours.name == "adam" else [])]
        opened = {
            name: getattr(OptimizerConfig, name) for name in names if getattr(ours, name) == getattr(theirs, name)
        }
        return dataclasses.replace(self, optimizer=dataclasses.replace(ours, **opened))

    @property
    def default_name(self) -> str:
        """Name of a run: angpt-laptop-s0, or angpt-d64-l2-s0 if the dimensions are not those of a preset."""
        model = dataclasses.asdict(self.model)
        named = (name for name, values in PRESETS.items() if values["model"].items() <= model.items())
        size = next(named, f"d{self.model.d_model}-l{self.model.n_layers}")
        return f"{self.recipe.replace('/', '-').replace(':', '-')}-{size}-s{self.seed}"


MACHINE_SETTINGS = ("micro_batch", "parallel", "shard_ranks", "recompute", "timeout", "kernels")
"""Settings that depend on the machines of a run. They change its numbers by rounding at most."""
RECORDS = (
    "eval_every", "log_every", "layers_every", "record_fp8", "checkpoint_every", "keep_checkpoints", "tensorboard",
    "wandb",
)  # fmt: skip
"""Settings that say when and where records are written."""
RESUME_SETTINGS = (*MACHINE_SETTINGS, "data.path", *RECORDS)
"""Settings that may change when a run is resumed, because they change the losses of its steps by rounding at most.

Data may have moved: its fingerprint is compared with that of the checkpoint. Not among them: `eval_tokens`, over which
the validation loss is a mean, and `record_moments`, whose records are summed over a whole run."""


def differences(
    one: TrainConfig, two: TrainConfig, ignored: Sequence[str] = MACHINE_SETTINGS
) -> dict[str, tuple[Any, Any]]:
    """Both values of each setting that differs, by dotted name, without those in `ignored`. What the model leaves open
    has the value that it implies."""
    if one == two:  # as for nearly all runs of a study
        return {}
    first, second = (settings_of(dataclasses.replace(config, model=config.model.resolved())) for config in (one, two))
    pairs = {name: (value, second[name]) for name, value in first.items() if name not in ignored}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """The values of all settings by their dotted names."""
    return _flat(dataclasses.asdict(config))


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested dictionaries by their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def parse_budget(text: str, parameters: int) -> int:
    """A budget in tokens: "100M", "2e9", "1_000_000", or "20x" for twenty times the number of parameters."""
    match = re.fullmatch(r"([0-9]+(?:_[0-9]+)*\.?[0-9]*(?:[eE]\+?[0-9]{1,2})?)\s*([kKmMbBxX]?)", text.strip())
    if match is None:
        raise UserError(f"tokens = {shown(text)} is not a budget; write a number (100M, 2e9) or a multiple (20x)")
    unit = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "x": parameters}[match[2].lower()]
    budget = float(match[1]) * unit
    if not 0.5 < budget < INTEGERS:
        raise UserError(f"tokens = {shown(text)} must be at least one token and below 2⁶³")
    return round(budget)


PRESETS: dict[str, dict[str, Any]] = {
    "laptop": {
        "model": {"d_model": 96, "n_layers": 3, "n_heads": 3, "vocab_size": 2048, "context": 128},
        "tokens": "600k",
        "batch_tokens": 2048,
        "eval_tokens": 24_576,
    },
    **{name: {"model": dict(zip(DIMENSIONS, dimensions, strict=True))} for name, dimensions in SIZES.items()},
}
"""Settings by the name of a size: laptop (minutes on two CPU cores), and the models of the paper."""


def preset(name: str) -> TrainConfig:
    """A configuration by name: laptop (minutes on two CPU cores), or a size of the paper, 32M to 1B."""
    return from_dict(TrainConfig, PRESETS[size_name(name)])


def size_name(text: str) -> str:
    """The name of a preset, given in any case."""
    found = next((name for name in PRESETS if name.lower() == text.lower()), None)
    if found is None:
        raise UserError(f"unknown size {text!r}: {nearest(text, PRESETS)}")
    return found
