"""Run as a program by test_hf.py: use exports with transformers alone, and write down what came out.

python load_exports.py FOLDER OUT: FOLDER has an export per architecture and tokens.json, OUT becomes a JSON file.
"""

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
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402


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
    model.save_pretrained(folder.with_name(folder.name + "-again"), max_shard_size="20KB")
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
    folders = sorted(p for p in root.iterdir() if p.is_dir())
    out.write_text(json.dumps({p.name: use(p, tokens, p.name in ("gpt+", "ngpt", "angpt")) for p in folders}))
