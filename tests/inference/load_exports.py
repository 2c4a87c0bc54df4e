"""Run as a program by test_hf.py: use exports with transformers alone, and write down what came out.

python load_exports.py FOLDER OUT: FOLDER has an export per architecture and tokens.json, OUT becomes a JSON file.
"""

import importlib.util
import json
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path


class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "angpt":
            raise ModuleNotFoundError("angpt is not installed here")


sys.meta_path.insert(0, Blocked())

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, CompileConfig  # noqa: E402
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


@torch.no_grad()
def use(folder, tokens, thorough):
    model = load(folder)
    greedy = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 256, "eos_token_id": None}
    prompt = tokens[:, :5]
    found = {
        "logits": model(tokens).logits.tolist(),
        "double": load(folder, dtype=torch.float64)(tokens).logits.tolist(),
        "cached": model.generate(prompt, **greedy)[:, 5:].tolist(),
    }
    if not thorough:
        return found
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    padded = tokenizer(["a", "several bytes"], return_tensors="pt", padding=True)
    low = load(folder, dtype=torch.bfloat16)
    labels = model(tokens, labels=tokens)
    for part, options in ((model, {"max_shard_size": "20KB"}), (tokenizer, {})):
        part.save_pretrained(folder.with_name(folder.name + "-again"), **options)
    return found | {
        "uncached": model.generate(prompt, **greedy, use_cache=False)[:, 5:].tolist(),
        "static": model.generate(prompt, **greedy, cache_implementation="static")[:, 5:].tolist(),
        "beams": model.generate(prompt, **greedy, num_beams=3).shape[1],
        "beam_scores": beam_scores(model, prompt),
        "padding_side": tokenizer.padding_side,
        "ids": tokenizer("déjà <|x|>").input_ids,
        "padded": model.generate(**padded, **greedy)[:, padded.input_ids.shape[1] :].tolist(),
        "alone": [
            model.generate(**tokenizer(text, return_tensors="pt"), **greedy)[0, -12:].tolist()
            for text in ("a", "several bytes")
        ],
        "eager": load(folder, attn_implementation="eager")(tokens).logits.tolist(),
        "bf16": low(tokens).logits.float().tolist(),
        "bf16_tokens": low.generate(prompt, **greedy).shape[1],
        "bf16_dtypes": sorted({f"{p.ndim} {p.dtype}" for p in low.parameters()}),
        "hidden_states": len(model(tokens, output_hidden_states=True).hidden_states),
        "kept": model(tokens, logits_to_keep=1).logits.shape[1],
        "loss": float(labels.loss),
        "tuple": isinstance(model(tokens, return_dict=False), tuple),
        "sampled": model.generate(prompt, max_new_tokens=4).shape[1],
        "defaults": [model.generation_config.temperature, model.generation_config.top_k],
    }


@torch.no_grad()
def compiled(folder, tokens):
    """Tokens of a compiled `generate` for prompts of several lengths, its graphs and its graph breaks."""
    model, found = load(folder), {}
    options = CompileConfig(fullgraph=True, dynamic=False, backend="eager", mode=None)
    options._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    for length in (12, 5, 7):
        made = model.generate(
            tokens[:, :length], do_sample=False, max_new_tokens=9, pad_token_id=256, eos_token_id=None,
            cache_implementation="static", compile_config=options,
        )  # fmt: skip
        found[length] = [made[:, length:].tolist(), counters["stats"]["unique_graphs"]]
    return {"tokens": found, "breaks": sum(counters["graph_break"].values())}


@torch.no_grad()
def as_flash(folder, tokens):
    """Logits with a function in the place of flash attention, and what it was called with."""
    calls = set()

    def attend(module, q, k, v, mask, dropout=0.0, scaling=None, **kwargs):
        calls.add((str(q.dtype), str(k.dtype), str(v.dtype), mask is None, module.is_causal, scaling, dropout))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("stand_in", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("stand_in", flash_attention_mask)
    model = load(folder, dtype=torch.bfloat16)
    assert model._supports_flash_attn
    expected = model(tokens).logits
    model.set_attn_implementation("stand_in")
    return {"error": float((model(tokens).logits - expected).abs().max()), "calls": sorted(calls)}


@torch.no_grad()
def by_engine(folder, tokens):
    """Logits as engines compute them: the base model on rows that are packed into one, attention by instances that are
    passed down, and a product with lm_head."""

    class Attention:
        def forward(self, q, k, v, scaling):
            parts = zip(*(x.split(tokens.shape[1], dim=2) for x in (q, k, v)), strict=True)
            return torch.cat([F.scaled_dot_product_attention(*p, is_causal=True, scale=scaling) for p in parts], dim=2)

    def attend(module, q, k, v, mask, scaling=None, attention_instances=None, **kwargs):
        return attention_instances[module.layer_idx].forward(q, k, v, scaling).transpose(1, 2).flatten(2), None

    ALL_ATTENTION_FUNCTIONS.register("engine", attend)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config._attn_implementation = "engine"
    model = AutoModel.from_config(config, trust_remote_code=True).eval()
    assert model.is_backend_compatible()
    weights = load_file(folder / "model.safetensors")
    head = weights.pop("lm_head.weight")
    model.load_state_dict(weights)
    hidden = model(
        input_ids=tokens.reshape(1, -1),
        position_ids=torch.arange(tokens.shape[1]).repeat(len(tokens))[None],
        use_cache=False,
        attention_instances={i: Attention() for i in range(config.num_hidden_layers)},
        return_dict=False,
    )[0]
    prompt = tokens[:, :5]
    made = load(folder).generate(prompt, do_sample=False, max_new_tokens=12, pad_token_id=256, eos_token_id=None)
    return {
        "logits": (hidden[0] @ head.T).view(*tokens.shape, -1).tolist(),
        "tokens": made[:, 5:].tolist(),
        "low": str(AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)(tokens)[0].dtype),
    }


def called_linear_maps(model, tokens):
    """Whether the forward hook of every linear map and embedding fires, once for each."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, (torch.nn.Linear, torch.nn.Embedding))}
    calls = []
    handles = [m.register_forward_hook(lambda *_, n=n: calls.append(n)) for n, m in layers.items()]
    model(tokens)
    for handle in handles:
        handle.remove()
    return sorted(calls) == sorted(layers)


def gradients(model, tokens, checkpointing):
    """Gradients of a training step, and how often each block computes its first map."""
    model.train()
    model.gradient_checkpointing_enable() if checkpointing else model.gradient_checkpointing_disable()
    calls = []
    handle = model.blocks[0].W_qkv.register_forward_hook(lambda *_: calls.append(1))
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    handle.remove()
    return {n: p.grad.clone() for n, p in model.named_parameters()}, len(calls)


def with_checkpointing(folder, tokens):
    model = load(folder)
    plain, once = gradients(model, tokens, checkpointing=False)
    recomputed, twice = gradients(model, tokens, checkpointing=True)
    return {"calls": [once, twice], "error": max(float((plain[n] - recomputed[n]).abs().max()) for n in plain)}


@torch.no_grad()
def attentions(folder, tokens):
    """What is wrong with the attention matrices, and the error without eager attention."""
    found = load(folder, attn_implementation="eager")(tokens, output_attentions=True).attentions
    upper = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()
    try:
        load(folder)(tokens, output_attentions=True)
        error = ""
    except ValueError as raised:
        error = str(raised)
    return {
        "shapes": [list(a.shape) for a in found],
        "row_error": max(float((a.sum(-1) - 1).abs().max()) for a in found),
        "future": max(float(a[..., upper].abs().max()) for a in found),
        "without_eager": error,
    }


@torch.no_grad()
def offloaded(folder, tokens, scratch):
    """Logits of a model whose weights accelerate reads from disk as they are needed, and with device maps."""
    from accelerate import disk_offload

    model = load(folder)
    parts = [f"blocks.{i}" for i in range(len(model.blocks))] + [n for n, _ in model.named_children() if n != "blocks"]
    mixed = {name: "disk" if name.endswith(("1", "W_h", "s_z")) else "cpu" for name in parts}
    disk_offload(model, str(scratch / "offload"))
    return {
        "disk_offload": model(tokens).logits.tolist(),
        "auto": load(folder, device_map="auto")(tokens).logits.tolist(),
        "mixed": load(folder, device_map=mixed, offload_folder=str(scratch / "mixed"))(tokens).logits.tolist(),
    }


def with_lora(folder, tokens):
    """A step of LoRA: adapters without a gradient, and how far the merged model is from the one with adapters."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(load(folder), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.enable_input_require_grads()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    before = float(model(tokens, labels=tokens).loss)
    model(tokens, labels=tokens).loss.backward()
    adapters = {n: p.grad for n, p in model.named_parameters() if "lora_B" in n}
    optimizer.step()
    model.eval()
    with torch.no_grad():
        tuned = model(tokens, labels=tokens)
        merged = model.merge_and_unload()(tokens).logits
    return {
        "adapters": len(adapters),
        "without_gradient": [n for n, g in adapters.items() if g is None or not g.any()],
        "losses": [before, float(tuned.loss)],
        "merge_error": float((merged - tuned.logits).abs().max()),
    }


def use_with_tools(folder, tokens, scratch):
    """What hooks, gradient checkpointing, attention matrices, accelerate and peft make of an export."""
    found = {
        "hooks": called_linear_maps(load(folder), tokens),
        "checkpointing": with_checkpointing(folder, tokens),
        "attentions": attentions(folder, tokens),
    }
    for tool, check in {
        "accelerate": lambda: offloaded(folder, tokens, scratch),
        "peft": lambda: with_lora(folder, tokens),
    }.items():
        found[tool] = check() if importlib.util.find_spec(tool) else None
    return found


def beam_scores(model, prompt):
    """Log-probability of what beam search and what greedy search found: more beams find no less likely text."""
    options = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 256, "eos_token_id": None}
    scores = []
    for beams in (1, 20):
        whole = model.generate(prompt[:1], **options, num_beams=beams)
        logs = torch.log_softmax(model(whole).logits, dim=-1)[:, 4:-1]
        scores.append(float(logs.gather(-1, whole[:, 5:, None]).sum()))
    return scores


if __name__ == "__main__":
    root, out = Path(sys.argv[1]), Path(sys.argv[2])
    tokens = torch.tensor(json.loads((root / "tokens.json").read_text()))
    main = ("gpt+", "ngpt", "angpt")
    engines = [root / "engine" / name for name in main]
    folders = sorted(p for p in root.iterdir() if p.is_dir() and p.name != "engine")
    found = {p.name: use(p, tokens, p.name in main) for p in folders}
    for folder in folders:
        if folder.name in main:
            found[folder.name]["tools"] = use_with_tools(folder, tokens, root / "scratch" / folder.name)
            found[folder.name]["compiled"] = compiled(folder, tokens)
            found[folder.name]["flash"] = as_flash(folder, tokens)
    for folder in engines:
        found[folder.name]["engine"] = by_engine(folder, tokens)
    out.write_text(json.dumps(found))
