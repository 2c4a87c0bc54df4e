import copy
import io
import pickle
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import angpt
from angpt.constraints import Constraint, constraints_of, largest_violation
from angpt.models.convert import FAMILIES, shortened
from angpt.models.parts import AnUpdate, NormedHeads, NormedOutput
from angpt.models.primitives import lerp, norm
from angpt.optim.standalone import hidden_matrices
from tests.inference.conftest import moved

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 50}
TOKENS = torch.randint(50, (2, 10), generator=torch.Generator().manual_seed(0))
PAGE = (Path(__file__).parents[2] / "docs" / "convert.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
NAMES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "vit")


def network(name: str, **options: Any) -> Any:
    """A small model of transformers, as transformers initialises it."""
    transformers = pytest.importorskip("transformers")
    kinds = {
        "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
        "mistral": ("MistralForCausalLM", "MistralConfig", SIZES | {"num_key_value_heads": 2}),
        "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", SIZES | {"num_key_value_heads": 2}),
        "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", SIZES | {"num_key_value_heads": 2, "head_dim": 16}),
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50}),
        "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES),
        "vit": ("ViTForImageClassification", "ViTConfig", {**SIZES, "image_size": 8, "patch_size": 2, "num_labels": 5}),
    }
    kind, config, sizes = kinds[name]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes, **options)).eval()


def inputs(name: str) -> dict[str, Tensor]:
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": images} if name == "vit" else {"input_ids": TOKENS}


@torch.no_grad()
def test_a_converted_llama_is_angpt() -> None:
    """Logits of equal weights agree, with every learned vector moved off its start."""
    cfg = angpt.ModelConfig(
        d_model=32, n_layers=2, n_heads=4, d_ff=48, vocab_size=50, context=32, rotary_fraction=1.0
    )  # fmt: skip
    ours, llama = moved(angpt.build(cfg, seed=0)), network("llama")
    angpt.convert(llama)
    llama.model.embed_tokens.weight.copy_(ours.W_e.weight)
    llama.lm_head.weight.copy_(ours.W_h.weight)
    llama.lm_head.s_z.stored.copy_(ours.s_z.stored)
    for block, layer in zip(ours.blocks, llama.model.layers, strict=True):
        attention, mlp = layer.self_attn.block, layer.mlp.block
        for part, rows in zip((attention.q_proj, attention.k_proj), block.W_qkv.weight.chunk(3), strict=False):
            part.block.weight.copy_(rows)
        attention.v_proj.weight.copy_(block.W_qkv.weight.chunk(3)[2])
        attention.o_proj.weight.copy_(block.W_p.weight)
        attention.q_proj.g.stored.copy_(block.g.stored)
        for part, rows in zip((mlp.up_proj, mlp.gate_proj), block.W_uz.weight.chunk(2), strict=True):
            part.weight.copy_(rows)
        mlp.down_proj.weight.copy_(block.W_d.weight)
        layer.self_attn.alpha.stored.copy_(block.alpha_a.stored)
        layer.mlp.alpha.stored.copy_(block.alpha_m.stored)
    assert sum(p.numel() for p in llama.parameters()) == ours.parameter_count()
    torch.testing.assert_close(llama(TOKENS).logits, ours(TOKENS), atol=1e-5, rtol=1e-5)
    # transformers computes rotary angles in fp32
    torch.testing.assert_close(llama.double()(TOKENS).logits, ours.double()(TOKENS), atol=1e-6, rtol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_a_converted_model_starts_with_vectors_of_length_one(name: str) -> None:
    model = network(name)
    angpt.convert(model, generator=torch.Generator().manual_seed(0))
    assert model.config.model_type in FAMILIES
    declared, named = constraints_of(model), dict(model.named_parameters())
    assert {n for n, p in named.items() if p.ndim > 1} == {n for n in declared if n in named}
    for parameter, constraint in declared.items():
        lengths = torch.linalg.vector_norm(model.get_parameter(parameter), dim=constraint.dim)
        torch.testing.assert_close(lengths, torch.ones_like(lengths), atol=1e-5, rtol=0)
    assert not any(p.any() for n, p in named.items() if n.endswith("bias"))
    found = model(**inputs(name), output_hidden_states=True)
    for h in found.hidden_states:
        torch.testing.assert_close(h.norm(dim=-1), torch.ones(h.shape[:-1]), atol=0.05, rtol=0)
    again = network(name)
    angpt.convert(again, generator=torch.Generator().manual_seed(0))
    assert torch.equal(again(**inputs(name)).logits, found.logits)


@pytest.mark.parametrize("name", NAMES)
def test_a_converted_model_trains_under_its_bounds_and_is_loaded_again(name: str, tmp_path: Path) -> None:
    model = network(name)
    report = angpt.convert(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    angpt.constrain(optimizer, model)  # warns of nothing
    labels = torch.tensor([1, 3]) if name == "vit" else TOKENS
    losses = []
    for _ in range(8):
        loss = model(**inputs(name), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.any() for n, p in model.named_parameters() if "stored" in n)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert largest_violation(model) < 1e-6
    assert "parameter without a bound" not in report.left
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        back = angpt.converted(type(model)).from_pretrained(tmp_path).eval()
        assert torch.equal(back(**inputs(name)).logits, model(**inputs(name)).logits)
        if name != "vit":
            options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            without = model.generate(TOKENS, **options, use_cache=False)
            assert torch.equal(model.generate(TOKENS, **options), without)


def test_outputs_of_transformers_transposed_maps_are_bounded() -> None:
    """Conv1D of GPT-2 has a column for each output."""
    declared = constraints_of(network("gpt2"))
    assert declared["transformer.h.0.mlp.c_fc.weight"] == Constraint("bound", 0)
    assert declared["transformer.wte.weight"] == Constraint("bound", 1)


def test_two_updates_of_one_stream_keep_its_length_to_the_fourth_order() -> None:
    """As in GPT-NeoX, for orthogonal h and outputs."""
    keep, add = (1 - 0.05) / (0.05**2 + 0.95**2) ** 0.5, 0.05 / (0.05**2 + 0.95**2) ** 0.5
    assert ((2 * keep - 1) ** 2 + 2 * add**2) ** 0.5 - 1 < add**4


def test_the_report_names_what_was_changed_and_what_was_left() -> None:
    report = angpt.convert(network("gpt2"))
    text = str(report)
    assert "norm removed (5): transformer.h.*.ln_1, transformer.h.*.ln_2, transformer.ln_f" in text
    assert "head tied to the embedding (1): lm_head" in text
    assert set(report.left) == {"bias", "dropout", "head tied to the embedding"}
    assert angpt.convert(network("llama")).left == {}
    assert list(angpt.convert(network("gpt_neox")).left) == [
        "bias",
        "both updates of a layer are added to the same stream",
    ]
    assert "norm" in angpt.convert(network("gpt2", add_cross_attention=True)).left
    assert shortened(["a.0.b", "a.1.b", "c.0"]) == "a.*.b, c.*"


def test_what_cannot_be_converted_is_explained_and_stays_as_it_is() -> None:
    with pytest.raises(angpt.UserError, match=r"Sequential: no description is known \(known: llama"):
        angpt.convert(nn.Sequential(nn.Linear(2, 2)))
    llama = network("llama")
    before = str(llama)
    wrong = FAMILIES["gpt2"]
    with pytest.raises(angpt.UserError, match="no attention found under the name attn"):
        angpt.convert(llama, wrong)
    assert str(llama) == before
    with pytest.raises(angpt.UserError, match="give d_model in the Description"):
        angpt.convert(nn.Sequential(nn.Linear(2, 2)), wrong)
    angpt.convert(llama)
    with pytest.raises(angpt.UserError, match="is converted already"):
        angpt.convert(llama)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # peft, of the transposed maps of GPT-2
def test_adapters_are_put_into_a_converted_model_and_merged(name: str) -> None:
    """The parts stay around the maps that peft replaces and brings back."""
    peft = pytest.importorskip("peft")
    model = network(name)
    angpt.convert(model)
    for part in model.modules():
        if isinstance(part, angpt.LearnedScale):
            part.stored.mul_(2)
    expected, parts = model(**inputs(name)).logits, str(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear")).eval()
    assert torch.equal(adapted(**inputs(name)).logits, expected)  # adapters start at 0
    for parameter, p in adapted.named_parameters():
        if "lora_B" in parameter:
            p.normal_(std=0.1)
    changed = adapted(**inputs(name)).logits
    merged = adapted.merge_and_unload()
    assert not torch.allclose(changed, expected, atol=1e-3)
    torch.testing.assert_close(merged(**inputs(name)).logits, changed, atol=1e-5, rtol=1e-5)
    assert str(merged) == parts


def test_adapters_come_after_conversion() -> None:
    peft = pytest.importorskip("peft")
    llama = network("llama")
    adapted = peft.get_peft_model(llama, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for model in (adapted, llama):
        with pytest.raises(angpt.UserError, match="convert first, then add LoRA"):
            angpt.convert(model)
    model = network("llama")
    angpt.convert(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj.block", "v_proj"]))
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 4


def test_a_head_with_a_scale_is_no_linear_map_and_declares_its_weight() -> None:
    head = angpt.ScaledHead(nn.Linear(4, 3))
    assert not isinstance(head, nn.Linear)
    assert [name for name, _ in head.named_parameters()] == ["weight", "bias", "s_z.stored"]
    assert constraints_of(nn.Sequential(nn.Linear(4, 4), head)) == {
        "0.weight": Constraint("bound", 1),
        "1.weight": Constraint("bound", 1),
    }
    assert hidden_matrices(nn.Sequential(nn.Linear(4, 4), head)) == {"0.weight": 1}
    with pytest.raises(angpt.UserError, match=r"weight of the head .* is no parameter"):
        angpt.ScaledHead(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved])
def test_a_loaded_model_can_be_copied(copied: Any) -> None:
    transformers = pytest.importorskip("transformers")
    kind = angpt.converted(transformers.LlamaForCausalLM)
    model = kind(transformers.LlamaConfig(**SIZES)).eval()
    again = copied(model)
    assert type(again) is kind is angpt.converted(transformers.LlamaForCausalLM)
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


@torch.no_grad()
def test_the_class_of_converted_models_takes_configs_and_descriptions(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    built = angpt.converted(transformers.LlamaForCausalLM)(transformers.LlamaConfig(**SIZES))
    torch.testing.assert_close(built.model.layers[0].mlp.block.up_proj.weight.norm(dim=1), torch.ones(48))
    where = angpt.Description(
        ("self_attn",), ("mlp",), ("input_layernorm", "post_attention_layernorm"), {"q_proj": "q"}, gated=True
    )
    model = network("llama")
    angpt.convert(model, where)
    model.save_pretrained(tmp_path)
    again = angpt.converted(transformers.LlamaForCausalLM, where).from_pretrained(tmp_path).eval()
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    assert torch.equal(copy.deepcopy(again)(TOKENS).logits, model(TOKENS).logits)
    for kind in (transformers.AutoModelForCausalLM, "llama"):
        with pytest.raises(angpt.UserError, match="converted needs the class of a model, such as LlamaForCausalLM"):
            angpt.converted(kind)


@torch.no_grad()
def test_learned_scales_are_loaded_in_fp32(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = network("llama", dtype="bfloat16").bfloat16()
    angpt.convert(model)
    for name, p in model.named_parameters():
        if "stored" in name:
            p.mul_(1 + 0.3 * torch.rand_like(p))
    model.save_pretrained(tmp_path)
    again = angpt.converted(transformers.LlamaForCausalLM).from_pretrained(tmp_path).eval()
    assert {p.dtype for p in again.parameters()} == {torch.float32, torch.bfloat16}
    assert all(p.dtype == q.dtype and p.equal(q) for p, q in zip(again.parameters(), model.parameters(), strict=True))
    model.model.rotary_emb = again.model.rotary_emb  # whose angles `bfloat16` has rounded
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


class Layer(nn.Module):
    """A pre-norm residual layer of a user."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mix, self.ff = Mix(d), nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.mix(self.ln1(h))
        return h + self.ff(self.ln2(h))


class Mix(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@torch.no_grad()
def test_a_network_of_ones_own_is_converted_by_a_description() -> None:
    """Its layers then compute what Table 1 says, here restated with loops over heads."""
    torch.manual_seed(0)
    d, net = 32, nn.Sequential(Layer(32), nn.Linear(32, 5))
    where = angpt.Description(
        attention=("mix",), mlp=("ff",), norms=("ln1", "ln2"), heads={"qkv": "qkv"}, head=("1",), d_model=d, d_head=8
    )
    angpt.convert(net, where)
    layer, head = net[0], net[1]
    for part in net.modules():
        if isinstance(part, angpt.LearnedScale):
            part.stored.mul_(1 + 0.3 * torch.rand_like(part.stored))
    h = norm(torch.randn(2, 6, d))
    q, k, v = layer.mix.block.qkv.block(h * (d / 8) ** 0.5).chunk(3, -1)
    outputs = []
    for i in range(0, d, 8):
        scores = norm(q[..., i : i + 8]) @ norm(k[..., i : i + 8]).transpose(1, 2) * layer.mix.block.qkv.g()
        outputs.append(scores.softmax(-1) @ v[..., i : i + 8])
    alpha = layer.mix.alpha()
    nu = 1 / (alpha**2 + (1 - alpha) ** 2).sqrt()
    a = lerp(h, norm(layer.mix.block.out(torch.cat(outputs, -1))), alpha, nu)
    alpha = layer.ff.alpha()
    nu = 1 / (alpha**2 + (1 - alpha) ** 2).sqrt()
    m = lerp(a, norm(layer.ff.block(a * d**0.5)), alpha, nu)
    torch.testing.assert_close(net(h), m @ (head.weight * head.s_z()[:, None]).T + head.bias, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_shared_modules_are_converted_in_every_layer() -> None:
    """A shared MLP gets an update in each layer; a layer that is used twice stays one layer."""
    torch.manual_seed(0)
    net = nn.Sequential(Layer(32), Layer(32))
    net[1].ff, net[1].ln1 = net[0].ff, net[0].ln1
    net.append(net[1])
    where = angpt.Description(
        attention=("mix",), mlp=("ff",), norms=("ln1", "ln2"), heads={"qkv": "qkv"}, d_model=32, d_head=8
    )
    report = angpt.convert(net, where)
    assert net[2] is net[1]
    assert net[0].ff is not net[1].ff
    assert net[0].ff.block is net[1].ff.block
    assert report.changed["norm removed"] == ["0.ln1", "0.ln2", "1.ln1", "1.ln2"]
    h = norm(torch.randn(2, 6, 32))
    torch.testing.assert_close(net(h).norm(dim=-1), torch.ones(2, 6), atol=0.15, rtol=0)


def test_a_wrong_description_is_refused() -> None:
    parts: dict[str, Any] = {"attention": ("mix",), "mlp": ("ff",), "norms": ("ln1",), "heads": {"q": "q"}}
    with pytest.raises(angpt.UserError, match=r"Description.norms must be a list, not 'ln1'"):
        angpt.Description(**parts | {"norms": "ln1"})
    with pytest.raises(angpt.UserError, match=r"Description.heads.q must be 'q' or 'k' or .*, not 'query'"):
        angpt.Description(**parts | {"heads": {"q": "query"}})


def test_full_names_stand_for_one_module() -> None:
    """Also if modules inside blocks have names that end with them."""
    net = nn.Sequential(nn.Embedding(50, 32), Layer(32), nn.LayerNorm(32), nn.Linear(32, 50))
    report = angpt.convert(net, described(norms=("ln1", "ln2", "2"), start=("0",), head=("3",)))
    assert report.changed["norm removed"] == ["1.ln1", "1.ln2", "2"]
    assert report.changed["start of the residual stream normed"] == ["0"]
    assert report.changed["logits scaled by s_z"] == ["3"]
    assert isinstance(net[1].ff.block[2], nn.Linear)


def described(**options: Any) -> angpt.Description:
    parts = {"attention": ("mix",), "mlp": ("ff",), "norms": ("ln1", "ln2"), "heads": {"qkv": "qkv"}}
    return angpt.Description(**parts | {"d_model": 32, "d_head": 8} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norms": ("ln1", "nrom2")}, "nothing to convert under the names nrom2 of"),
        ({"start": ("embedding",), "head": ("lm_head",)}, "nothing to convert under the names embedding, lm_head of"),
        ({"norms": ("ln1", "ln2", "ff.2")}, "0.ff.2 is no norm but a Linear"),
    ],
)
def test_names_that_do_not_fit_the_network_are_refused(options: dict[str, Any], message: str) -> None:
    net = nn.Sequential(Layer(32))
    before = str(net)
    with pytest.raises(angpt.UserError, match=message):
        angpt.convert(net, described(**options))
    assert str(net) == before


def test_fused_maps_with_fewer_keys_are_refused() -> None:
    net = Layer(32)
    net.config = SimpleNamespace(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)  # type: ignore[assignment]
    with pytest.raises(
        angpt.UserError, match="qkv: a fused map needs as many keys as queries, but the config has 2 and 4 heads"
    ):
        angpt.convert(net, described())


class DropPath(nn.Module):
    drop_prob = 0.1


def test_the_report_lists_learned_vectors_and_dropped_updates() -> None:
    net = nn.ModuleDict({"layer": Layer(32), "norm": nn.LayerNorm(32), "drop": DropPath()})
    net["layer"].register_parameter("gamma", nn.Parameter(torch.ones(32)))
    net["layer"].register_parameter("frozen", nn.Parameter(torch.ones(32), requires_grad=False))
    report = angpt.convert(net, described())
    assert report.left["learned vector"] == ["layer.gamma"]
    assert report.left["dropout"] == ["drop"]
    assert report.left["norm"] == ["norm"]


class Statistics(nn.Module):
    """A module of a user with a method `reset`."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(7.0))

    def reset(self) -> None:
        self.seen.zero_()


@torch.no_grad()
def test_biases_and_padding_start_at_zero() -> None:
    net = nn.ModuleList([nn.LSTM(3, 4), nn.MultiheadAttention(4, 2), nn.Embedding(5, 4, padding_idx=2)])
    for p in net.parameters():
        p.fill_(3.0)
    net.append(Statistics())
    angpt.init_unit_rows_(net)
    assert net[3].seen.item() == 7
    assert not any(p.any() for name, p in net.named_parameters() if "bias" in name)
    assert net[2].weight.norm(dim=1).tolist() == pytest.approx([1, 1, 0, 1, 1])


@torch.no_grad()
@pytest.mark.parametrize("heads", ["qkv", "qkv per head"])
def test_heads_are_normed_where_the_network_reads_them(heads: Any) -> None:
    part = NormedHeads(nn.Identity(), 4, heads, scaling=0.25)
    x = torch.randn(2, 3, 24)
    shape, dim = ((3, 2, 4), -3) if heads == "qkv" else ((2, 3, 4), -2)
    before, after = x.unflatten(-1, shape).unbind(dim), part(x).unflatten(-1, shape).unbind(dim)
    torch.testing.assert_close(after[0], norm(before[0]) * 2 / 0.25)
    torch.testing.assert_close(after[1], norm(before[1]))
    assert torch.equal(after[2], before[2])


@torch.no_grad()
def test_parts_of_ones_own_network() -> None:
    torch.manual_seed(0)
    d = 64
    block, h = nn.Linear(d, d, bias=False), norm(torch.randn(5, d))
    residual, update = angpt.AnResidual(block, d, factor=3.0), AnUpdate(block, d, factor=3.0)
    expected = lerp(h, norm(block(3 * h)), torch.tensor(0.05), 1 / (0.05**2 + 0.95**2) ** 0.5)
    torch.testing.assert_close(residual(h), expected)
    torch.testing.assert_close(h + update(h), expected)
    table = NormedOutput(nn.ParameterList([torch.randn(3, d)]))
    assert table.constraints() == {"block.0": Constraint("bound", -1)}
    net = nn.Sequential(residual, angpt.ScaledHead(nn.Linear(d, 7)))
    angpt.init_unit_rows_(net)
    torch.testing.assert_close(net[1].weight.norm(dim=1), torch.ones(7))
    torch.testing.assert_close(net(h), residual(h) @ net[1].weight.T)
    assert angpt.mlp_factor(64, 256, gated=True) == 0.5
    assert angpt.mlp_factor(64, 256, gated=False) == 8.0


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_of_the_page_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "convert.md", "exec"), {"__name__": "page"})


def test_the_experiment_with_images_trains_under_the_bound() -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("transformers")
    digits = runpy.run_path(str(Path(__file__).parents[2] / "experiments" / "digits.py"))
    train, validation, test = digits["splits"]()
    assert [len(labels) for _, labels in (train, validation, test)] == [1000, 297, 500]
    _, share = digits["train"](digits["converted"], 8e-3, 2, 0, validation)
    assert share > 0.6
