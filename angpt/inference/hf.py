"""Export to Hugging Face transformers, as a folder that loads without angpt, and import from such a folder.

The folder holds the trained weights and modeling_angpt.py, which computes all architectures from them. The weights are
unchanged, so that they can be imported again, except in an export for engines, which has s_z multiplied into the head.
Writing the folder does not need transformers.
"""

import json
import shutil
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor

from angpt.config import DataConfig, TrainConfig
from angpt.constraints import is_matrix, largest_violation
from angpt.data.shards import TOKENIZER
from angpt.data.tokenizers import end_token, fingerprint, vocab_size
from angpt.errors import UserError
from angpt.inference.card import Evaluation, model_card
from angpt.inference.fold import fold
from angpt.inference.sampling import Sampling
from angpt.inference.source import EXPORT_CONFIG, EXPORT_WEIGHTS, EXPORTED_SHA256, Source
from angpt.inference.store import Training, save_tensors
from angpt.models.decoder import Decoder
from angpt.models.primitives import LearnedScale
from angpt.serialization import read_toml, to_toml
from angpt.system import new_folder, write_atomically
from angpt.training import checkpoint
from angpt.training.run import Run
from angpt.version import __version__

CODE = "modeling_angpt"
RUN_CONFIG = "run.toml"
"""The configuration of the run, which transformers ignores."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""The special tokens of transformers; all are the end-of-text token here."""
LARGEST_ROUNDING = 2**-8
"""Most by which rounding to bf16 can lengthen a vector, relative to its length."""


def export(source: Source, folder: Path, evaluation: Evaluation = (), engine: bool = False) -> None:
    """Write a trained model as a folder that transformers loads with `trust_remote_code=True`.

    `engine`: for engines that run transformers' models and compute the logits as one product with `lm_head`: s_z is
    multiplied into it, so that the folder cannot be imported again.
    """
    model = source.decoder()
    fold(model)  # checks that the design describes the model
    tokenizer = source.tokenizer() if source.tokenizer_path is not None else None
    end, training = None if tokenizer is None else end_token(tokenizer), source.training
    if tokenizer is not None and vocab_size(tokenizer) > source.cfg.vocab_size:
        raise UserError(f"{source.tokenizer_path}: has more tokens than the model's vocabulary")
    if tokenizer is not None and tokenizer.num_special_tokens_to_add(is_pair=False):
        tokenizer.post_processor = None  # transformers would add tokens that the model has not seen
        training = replace(training, tokenizer_fingerprint=fingerprint(tokenizer))
    with new_folder(folder) as part:
        save_tensors(with_plain_head(model) if engine else model.state_dict(), part / EXPORT_WEIGHTS)
        shutil.copyfile(Path(__file__).with_name(f"{CODE}.py"), part / f"{CODE}.py")
        values = config_json(model, end, training, engine) | {EXPORTED_SHA256: source.sha256()}
        write_json(part / EXPORT_CONFIG, values)
        sampling = {"do_sample": True, "temperature": Sampling.temperature, "top_k": Sampling.top_k}
        write_json(part / "generation_config.json", sampling | ({} if end is None else dict.fromkeys(TOKEN_IDS, end)))
        if tokenizer is not None:
            write_atomically(part / TOKENIZER, tokenizer.to_str())
            write_json(part / "tokenizer_config.json", tokenizer_json(source.cfg.context, tokenizer, end))
        if (run_config := None if source.changed else run_configuration(source)) is not None:
            write_atomically(part / RUN_CONFIG, to_toml(run_config))
        write_atomically(part / "README.md", model_card(source, model, run_config, evaluation, engine))


def with_plain_head(model: Decoder) -> dict[str, Tensor]:
    """The parameters, with s_z multiplied into the rows of the head, which is called lm_head."""
    tensors = {name: t for name, t in model.state_dict().items() if not name.startswith("s_z.")}
    head, source = tensors.pop("W_h.weight"), cast("Any", model)
    rows = source.s_z().double()[:, None] if model.design().s_z else 1.0
    return tensors | {"lm_head.weight": (head.double() * rows).to(head.dtype)}


def as_transformers(model: Decoder, device: torch.device, dtype: torch.dtype) -> Any:
    """The model that transformers would load from an export."""
    from angpt.inference.modeling_angpt import AnGPTConfig, AnGPTForCausalLM

    with torch.device(device):
        found = AnGPTForCausalLM(AnGPTConfig(**config_json(model, None, Training())))
    found.load_state_dict(model.state_dict())
    for p in found.parameters():  # what from_pretrained does for this class
        p.data = p.data.to(dtype if is_matrix(p) else torch.float32)
    return found.eval()


def config_json(model: Decoder, end: int | None, training: Training, engine: bool = False) -> dict[str, Any]:
    cfg, fixed = model.cfg, stored_gain(model, "g", "s_uz")
    design = replace(model.design(), s_z=False) if engine else model.design()
    constraints = {name.split(".")[-2]: [c.kind, c.dim] for name, c in model.constraints().items()}
    if fixed not in (None, 1.0):
        raise UserError(f"{cfg.architecture}: exports store g and s_uz as they are, not divided by {fixed:g}")
    scales = {"alpha": stored_gain(model, "alpha_a", "alpha_m"), "s_qk": stored_gain(model, "s_qk")}
    scales |= {name: stored_gain(model, name) for name in ("s_z", "s_h")}
    return {
        "architectures": ["AnGPTForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{CODE}.AnGPTConfig",
            "AutoModel": f"{CODE}.AnGPTModel",
            "AutoModelForCausalLM": f"{CODE}.AnGPTForCausalLM",
        },
        "model_type": "angpt",
        "dtype": "float32",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "intermediate_size": cfg.d_mlp,
        "max_position_embeddings": cfg.context,
        "rotary_dim": cfg.rotary_dim,
        "rotary_base": cfg.rotary_base,
        "tie_word_embeddings": False,
        **dict.fromkeys(TOKEN_IDS, end),
        "graph": asdict(design),
        "scales": {name: gain for name, gain in scales.items() if gain is not None},
        "weight_constraints": {} if engine else constraints,
        "for_engines": engine,
        "angpt_version": __version__,
        "angpt_model": {key: value for key, value in asdict(cfg).items() if value is not None},
        "angpt_training": asdict(training),
    }


def stored_gain(model: Decoder, *names: str) -> float | None:
    """The factor of the stored vectors of these learned scales, which is one for all layers; None without them."""
    parts = [part for name, part in model.named_modules() if name.rpartition(".")[2] in names]
    found = {part.init / part.scale for part in parts if isinstance(part, LearnedScale)}
    if len(found) > 1:
        raise UserError(
            f"{model.cfg.architecture}: {names[0]} has several stored scales; exports have one for all layers"
        )
    return next(iter(found), None)


def tokenizer_json(context: int, tokenizer: Tokenizer, end: int | None) -> dict[str, Any]:
    names = {} if end is None else dict.fromkeys(("bos_token", "eos_token", "pad_token"), tokenizer.id_to_token(end))
    fixed = {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left"}
    return {**fixed, "model_max_length": context, "clean_up_tokenization_spaces": False, **names}


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def run_configuration(source: Source) -> TrainConfig | None:
    """The configuration of the run that the model comes from; None if it is unknown."""
    if source.kind == "run":
        return Run.open(source.path).config()
    path = source.path / RUN_CONFIG
    return read_toml(TrainConfig, path) if path.exists() else None


def import_run(source: Source, folder: Path) -> None:
    """Write a run folder with the weights of an export, byte for byte, and without optimizer state.

    Warns of weights that violate the constraints of their architecture, as those that were trained without them.
    """
    if source.kind != "export":
        raise UserError(f"{source.path}: is not an export but a {source.kind}")
    model = source.decoder()
    data = DataConfig(mask_documents=source.training.mask_documents)
    config = None if source.changed else run_configuration(source)
    config = config or TrainConfig(model=source.cfg, data=data)
    config = replace(config, model=replace(config.model, vocab_size=source.cfg.vocab_size))  # which may be resized
    if config.model != source.cfg:
        raise UserError(f"{source.path}: {RUN_CONFIG} and {EXPORT_CONFIG} describe different models")
    if (violation := largest_violation(model)) > LARGEST_ROUNDING:
        warnings.warn(
            f"{source.path}: weight vectors miss the length that {source.cfg.architecture} keeps them at by up to "
            f"{violation:.3g}; train with angpt.integrations.transformers.ConstrainCallback, and call "
            "angpt.apply_constraints(model) for what is trained already; imported as they are",
            stacklevel=2,
        )
    training = source.training
    state = checkpoint.State(
        step=training.step or 0,
        architecture=config.recipe,
        metrics_bytes=0,
        seconds=0.0,
        val_loss=training.val_loss,
        data_fingerprint="",
        tokenizer_fingerprint=training.tokenizer_fingerprint,
        sha256={},
        config=config,
    )
    with new_folder(folder) as part:
        write_atomically(part / "config.toml", to_toml(config))
        if source.tokenizer_path is not None:
            shutil.copyfile(source.tokenizer_path, part / TOKENIZER)
        checkpoint.save(part / "checkpoints", model.state_dict(), {}, state, keep=1)
