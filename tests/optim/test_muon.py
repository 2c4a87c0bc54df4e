"""Muon against the singular value decomposition, against torch.optim.Muon, and on networks of other people."""

import copy

import pytest
import torch
from torch import nn

import angpt
from angpt.cli.main import main
from angpt.config import OptimizerConfig, TrainConfig
from angpt.constraints import largest_violation
from angpt.errors import UserError
from angpt.models.variants import ARCHITECTURES
from angpt.optim import muon
from angpt.optim.muon import (
    COEFFICIENTS,
    RECTANGULAR_GROUPS,
    SQUARE_GROUPS,
    orthogonalize,
    row_scale,
    symmetric_polynomial,
    symmetric_product,
)
from angpt.optim.optimizer import Optimizer
from angpt.optim.standalone import hidden_matrices
from angpt.present.words import label
from angpt.serialization import to_toml
from angpt.studies.config import Grid, StudyConfig
from angpt.training.engine import Engine
from angpt.training.plan import make_plan
from tests.optim.test_adam import batches, tiny

MUON = OptimizerConfig(name="muon", weight_decay=0.0)


def polynomial(s):
    """What the iterations make of a singular value."""
    a, b, c = COEFFICIENTS
    assert sum(SQUARE_GROUPS) == sum(RECTANGULAR_GROUPS) == 5
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 5, 12), (2, 12, 5), (1, 1, 7), (1, 7, 1)])
def test_newton_schulz_acts_on_singular_values_alone(shape):
    """U p(S) Vᵀ with the polynomial p applied to the singular values, in float64."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = polynomial(s / s.square().sum(dim=-1, keepdim=True).sqrt())
    torch.testing.assert_close(orthogonalize(x), u @ torch.diag_embed(s) @ v, rtol=1e-6, atol=1e-7)


def test_singular_values_end_near_1():
    """Those of a matrix, and of the polynomial for values above 1/400 of the Frobenius norm."""
    x = torch.randn(4, 64, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for s in (torch.linalg.svdvals(orthogonalize(x)), polynomial(torch.linspace(1 / 400, 1, 10_000))):
        assert s.min() > 0.68
        assert s.max() < 1.21


def test_a_matrix_without_gradients_comes_to_rest():
    """Its momentum decays to nothing; an update of constant length would be made of rounding errors, or NaN."""
    w = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    optimizer = angpt.Muon(nn.ParameterDict({"w": w}), hidden={"w": 1})
    w.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(800):
        optimizer.step()
        w.grad = torch.zeros(8, 8)
    rest = w.detach().clone()
    for _ in range(1200):
        optimizer.step()
    assert w.isfinite().all()
    torch.testing.assert_close(w.detach(), rest, rtol=0, atol=1e-4)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(orthogonalize(torch.zeros(1, 3, 5, dtype=dtype)), torch.zeros(1, 3, 5, dtype=dtype))
    with pytest.raises(UserError, match="the range of float16 is too small"):
        angpt.Muon(nn.ParameterDict({"w": w}), hidden={"w": 1}, dtype=torch.float16)


def test_a_zero_matrix_stays_zero():
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 5)), torch.zeros(2, 3, 5))


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_bf16_is_as_accurate_with_iterations_in_groups(exponent, monkeypatch):
    """On rectangular matrices, also with singular values 1, 2⁻ᵉ, 3⁻ᵉ, …, by the error of single iterations."""
    x = torch.randn(2, 96, 384, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if exponent:
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        x = u * torch.arange(1.0, 97.0).double() ** -exponent @ v
    exact, grouped = orthogonalize(x), orthogonalize(x.bfloat16()).double()
    monkeypatch.setattr(muon, "RECTANGULAR_GROUPS", SQUARE_GROUPS)
    torch.testing.assert_close(orthogonalize(x), exact)
    single = orthogonalize(x.bfloat16()).double()
    assert (grouped - exact).norm() < 1.5 * (single - exact).norm()
    assert (single - exact).norm() < 0.2 * exact.norm()


def test_a_symmetric_product_is_the_product():
    x = torch.randn(3, 6, 9)
    gram = symmetric_product(x, x)
    torch.testing.assert_close(gram, torch.stack([m @ m.T for m in x]))
    expected = torch.stack([3 * torch.eye(6) + 0.5 * m + 2 * m @ m for m in gram])
    torch.testing.assert_close(symmetric_polynomial(gram, 3.0, 0.5, 2.0), expected)
    squares = torch.tensor([4.0, 9.0, 25.0])
    expected = torch.stack(
        [symmetric_polynomial(m[None] / s, 3.0, 0.5, 2.0)[0] / s**0.5 for m, s in zip(gram, squares, strict=True)]
    )
    torch.testing.assert_close(symmetric_polynomial(gram, 3.0, 0.5, 2.0, squares), expected)


@pytest.mark.parametrize(("rows", "columns"), [(48, 192), (192, 48), (64, 64)])
def test_rows_of_an_update_have_about_length_1(rows, columns):
    x = torch.randn(1, rows, columns, generator=torch.Generator().manual_seed(1))
    lengths = (orthogonalize(x) * row_scale(rows, columns))[0].norm(dim=1)
    assert lengths.mean().item() == pytest.approx(0.85, abs=0.05)  # the mean of the singular values


def test_the_learning_rate_is_the_angle_of_a_constrained_vector():
    """Also of the columns of W_d and W_p of nGPT: singular values of the update are 0.85 in the mean."""
    for architecture in ("ngpt", "angpt"):
        model = tiny(architecture)
        optimizer = angpt.Muon(model, lr=0.01)
        angpt.constrain(optimizer, model)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model(*next(batches(1))).backward()
        optimizer.step()
        constraints = model.constraints()
        for name, maps in model.hidden_matrices().items():
            old, new, dim = before[name], dict(model.named_parameters())[name], constraints[name].dim
            cosine = (old * new).sum(dim) / (old.norm(dim=dim) * new.norm(dim=dim))
            assert cosine.clamp(max=1.0).acos().mean().item() == pytest.approx(0.0085, rel=0.15), (name, maps)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_a_single_matrix_is_updated_as_by_torch(shape):
    """Ten steps, up to the rounding of torch, which orthogonalizes in bf16."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours, theirs = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    module = nn.ParameterDict({"w": ours})
    mine = angpt.Muon(module, lr=0.1, weight_decay=0.2, hidden={"w": 1})
    reference = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.2, momentum=0.95)
    for step in range(10):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        reference.step()
    assert (ours - theirs).norm() < 0.02 * (ours - weight).norm()


def test_stacked_maps_are_orthogonalized_one_by_one():
    q, k = torch.randn(6, 6), torch.randn(6, 6)
    together, apart = (
        nn.ParameterDict(p) for p in ({"w": torch.zeros(12, 6)}, {"q": torch.zeros(6, 6), "k": torch.zeros(6, 6)})
    )
    one, two = angpt.Muon(together, hidden={"w": 2}), angpt.Muon(apart, hidden={"q": 1, "k": 1})
    together["w"].grad = torch.cat([q, k])
    apart["q"].grad, apart["k"].grad = q, k
    one.step()
    two.step()
    torch.testing.assert_close(together["w"].detach(), torch.cat([apart["q"], apart["k"]]).detach())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_run_takes_the_steps_of_the_plain_optimizer(architecture):
    """The engine's step against the optimizer for any network, with clipping and the constraint outside of it."""
    config = OptimizerConfig(name="muon", lr=0.03, adam_lr=0.01, weight_decay=0.1, clip=0.5)
    ours, plain = tiny(architecture), tiny(architecture)
    engine = Engine(ours, config, torch.float32, compiled=False)
    optimizer = angpt.Muon(plain, lr=0.03, adam_lr=0.01, weight_decay=0.1)
    angpt.constrain(optimizer, plain)
    for number, batch in enumerate(batches(20), start=1):
        loss = engine.backward(batch, micro_batch=2)
        engine.step(number, lr=0.03 / number)
        for group in optimizer.param_groups:
            group["lr"] = (0.03 if group["maps"] else 0.01) / number
        expected = plain(*batch)
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert largest_violation(ours, ours.constraints()) < 1e-6


def test_hidden_matrices_have_one_moment():
    """State in memory is that of Adam less the second moment of hidden matrices."""
    model = tiny("angpt")
    states = Optimizer(dict(model.named_parameters()), model.constraints(), MUON, hidden=model.hidden_matrices()).states
    hidden = model.hidden_matrices()
    assert {
        name for name, s in zip(dict(model.named_parameters()), states, strict=True) if s.exp_avg_sq is None
    } == set(hidden)
    assert sorted(set(hidden.values())) == [1, 2, 3]
    assert all(name.startswith("blocks.") for name in hidden)


def test_matrices_of_one_shape_are_one_batch(monkeypatch):
    shapes = []
    inner = muon.orthogonalize
    monkeypatch.setattr(muon, "orthogonalize", lambda x: (shapes.append(tuple(x.shape)), inner(x))[1])
    model = tiny("angpt")  # two layers, d_m = 32, d_f = 128
    engine = Engine(model, MUON, torch.float32, compiled=False)
    engine.backward(next(batches(1)), 4)
    engine.step(1, 0.01)
    assert sorted(shapes) == [(2, 32, 32), (2, 32, 128), (4, 128, 32), (6, 32, 32)]


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.head = nn.Linear(16, 11)

    def forward(self, x):
        return self.head(self.layer(self.embedding(x)))


def test_hidden_matrices_of_any_network():
    assert hidden_matrices(Tower()) == {
        "layer.self_attn.in_proj_weight": 3,
        "layer.self_attn.out_proj.weight": 1,
        "layer.linear1.weight": 1,
        "layer.linear2.weight": 1,
    }
    assert hidden_matrices(nn.Linear(3, 4)) == {}
    with pytest.raises(UserError, match="the Linear has no hidden matrix"):
        angpt.Muon(nn.Linear(3, 4))


@pytest.mark.parametrize("wrap", [torch.compile, lambda model: nn.Sequential(model)], ids=["compiled", "inside"])
def test_a_wrapped_model_keeps_its_declaration(wrap):
    model = tiny("angpt")
    groups = angpt.Muon(wrap(model)).param_groups
    assert {group["maps"]: len(group["params"]) for group in groups if group["maps"]} == {1: 4, 2: 2, 3: 2}


def test_a_head_that_is_tied_to_a_layer_is_not_hidden():
    first, middle, head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    head.weight = first.weight
    assert hidden_matrices(nn.Sequential(first, middle, head)) == {"1.weight": 1}


def test_a_head_behind_a_model_that_declares_its_matrices_is_not_hidden():
    body = tiny("angpt")
    declared = {f"1.{name}": maps for name, maps in body.hidden_matrices().items()}
    assert hidden_matrices(nn.Sequential(nn.Linear(8, 8), body, nn.Linear(8, 1))) == {"0.weight": 1} | declared


class Conv1D(nn.Module):
    """A linear map as in transformers, whose columns are outputs."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


def test_maps_with_outputs_in_columns_are_hidden_and_cannot_be_stacked():
    net = nn.Sequential(Conv1D(24, 8), nn.Linear(24, 4))
    groups = angpt.Muon(net).param_groups
    assert [(group["maps"], group["by_columns"]) for group in groups if group["maps"]] == [(1, True)]
    with pytest.raises(UserError, match=r"'0.weight' has its outputs in columns, where no matrices are stacked"):
        angpt.Muon(net, hidden={"0.weight": 2})


def test_what_is_frozen_is_trained_when_it_no_longer_is():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)).requires_grad_(False)
    optimizer = angpt.Muon(net)
    net.requires_grad_(True)
    before = [p.clone() for p in net.parameters()]
    net(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    assert not any(torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize("wrong", [lambda net: angpt.Muon(net.parameters()), lambda net: angpt.Muon(net, hidden=["0"])])
def test_muon_takes_a_network_and_names(wrong):
    with pytest.raises(UserError, match="Muon takes a network"):
        wrong(nn.Linear(3, 3))


@pytest.mark.parametrize("dim", [0, (0,), -2, (-2,)])
def test_columns_may_be_declared_in_any_way(dim):
    class Columns(nn.Linear):
        def constraints(self):
            return {"weight": ("unit", dim)}

    groups = angpt.Muon(Columns(4, 6), hidden={"weight": 1}).param_groups
    assert [group["by_columns"] for group in groups if group["maps"]] == [True]


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 2), nn.Linear(4, 3)])
def test_the_order_of_numbers_in_memory_does_not_matter(layer):
    """Neither for Adam (filters) nor for Muon (matrices)."""
    torch.manual_seed(0)
    other = copy.deepcopy(layer)
    turned = other.weight.data.transpose(0, 1).contiguous().transpose(0, 1)
    other.weight = nn.Parameter(turned)
    assert not turned.is_contiguous()
    for model in (layer, other):
        net = nn.ModuleList([nn.Linear(2, 2), model])
        optimizer = angpt.Muon(net, hidden={"0.weight": 1} if model.weight.ndim > 2 else {"1.weight": 1})
        for step in range(3):
            model.weight.grad = torch.randn(model.weight.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()
            if model is other and step == 1:
                other.weight.data = other.weight.data.contiguous()
    torch.testing.assert_close(other.weight, layer.weight)


def test_groups_can_be_added_and_empty_matrices_are_skipped():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = angpt.Muon(model)
    more = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [more]})
    for p in (*model.parameters(), more):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not torch.equal(more, torch.ones(3))


def train(model, optimizer, steps=30):
    tokens = torch.randint(11, (8, 12), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_it_trains_a_network_of_other_people_and_can_be_saved():
    torch.manual_seed(0)
    model = Tower()
    optimizer = angpt.Muon(model, lr=0.02, adam_lr=0.01)
    losses = train(model, optimizer)
    assert losses[-1] < 0.2 * losses[0]
    twin = Tower()
    twin.load_state_dict(model.state_dict())
    other = angpt.Muon(twin, lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(model, optimizer, 5) == train(twin, other, 5)


def test_a_scheduler_and_a_closure_work():
    model = Tower()
    optimizer = angpt.Muon(model, lr=0.02, adam_lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [0.005, 0.01]
    before = model.head.weight.detach().clone()

    def closure():
        loss = model(torch.arange(11)[None]).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    scheduler.step()
    assert not torch.equal(before, model.head.weight)


def test_a_compiled_step_is_not_compiled_again_and_again():
    """Neither by the number of the step nor by a rate that changes; the result is that of the plain step."""
    plain, compiled = Tower(), Tower()
    compiled.load_state_dict(plain.state_dict())
    one, two = angpt.Muon(plain), angpt.Muon(compiled)
    angpt.constrain(one, plain)
    angpt.constrain(two, compiled)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step, graphs = torch.compile(two.step, backend="eager"), []
    for number in range(6):
        for model, optimizer, call in ((plain, one, one.step), (compiled, two, step)):
            model(torch.arange(11)[None]).square().mean().backward()
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (number + 1)
            call()
            optimizer.zero_grad()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[1]
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        ({"nope": 1}, "'nope' is not a parameter"),
        ({"head.bias": 1}, "is not a stack of 1"),
        ({"head.weight": 2}, "is not a stack of 2"),
    ],
)
def test_wrong_names_are_refused(hidden, words):
    with pytest.raises(UserError, match=words):
        angpt.Muon(Tower(), hidden=hidden)


@pytest.mark.parametrize(("name", "instead"), [("adam_lr", "lr"), ("momentum", "beta1")])
def test_settings_of_muon_are_refused_without_it(name, instead):
    with pytest.raises(UserError, match=f"optimizer.{name} needs optimizer.name = 'muon'.* set optimizer.{instead}"):
        make_plan(TrainConfig(optimizer=OptimizerConfig(**{name: 0.1})))
    train = TrainConfig(optimizer=OptimizerConfig(**{name: 0.1}))
    with pytest.raises(UserError, match=f"train.optimizer.{name}: no run is trained by Muon"):
        StudyConfig(grid=(Grid(architectures=("gpt+", "angpt")),), train=train)
    StudyConfig(grid=(Grid(architectures=("gpt+", "angpt:muon")),), train=train)


def test_recipes():
    muon = OptimizerConfig(name="muon", adam_lr=0.1, momentum=0.9)
    config = TrainConfig(optimizer=muon).with_recipe("angpt/no-lerp:muon")
    assert (config.recipe, config.model.architecture) == ("angpt/no-lerp:muon", "angpt/no-lerp")
    assert config.optimizer == muon
    assert config.with_recipe("gpt+").optimizer == OptimizerConfig()  # nothing of Muon
    for wrong in ("angpt:", "angpt:adam", "angpt:sgd", "angpt:muon:muon", ":muon"):
        with pytest.raises(UserError, match="write angpt, which Adam trains, or angpt:muon"):
            TrainConfig().with_recipe(wrong)
    assert label("angpt/no-lerp:muon") == "anGPT no-lerp with Muon"


def test_another_optimizer_opens_the_rates(tmp_path, monkeypatch):
    """The config.toml of a run with Adam has a rate that would be wrong for Muon, and the other way round."""
    seen = []
    monkeypatch.setattr("angpt.cli.train.run_here", lambda config, folder, resumed: seen.append((config, folder)))
    for name, other in (("adam", "muon"), ("muon", "adam")):
        file = tmp_path / f"{name}.toml"
        momentum = 0.9 if name == "muon" else OptimizerConfig.momentum
        config = TrainConfig(optimizer=OptimizerConfig(name=name, momentum=momentum), device="cpu", tokens="1M")
        file.write_text(to_toml(make_plan(config).config))
        main(["train", "--config", str(file), "--optimizer.name", other])
    for config, folder in seen:
        assert config.optimizer.lr is None
        assert config.optimizer.given_for_muon == []
        assert folder.name.startswith(config.recipe.replace(":", "-"))
