import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import angpt
from angpt.constraints import (
    Constraint,
    apply_constraints,
    constraints_of,
    excess,
    largest_violation,
    left_out,
    norms,
    project_,
)
from angpt.models.variants import build
from tests.models.conftest import TINY, some_tokens
from tests.training.ranks import spread

matrices = st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10_000), st.sampled_from([1e-9, 0.1, 1, 30]))
dims = st.sampled_from([0, 1])


def matrix(shape):
    rows, columns, seed, size = shape
    return size * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@given(matrices, dims)
def test_bound_never_lengthens_and_leaves_what_is_inside(shape, dim):
    before = matrix(shape)
    after = project_(before.clone(), Constraint("bound", dim))
    for w, v in zip(before.unbind(1 - dim), after.unbind(1 - dim), strict=True):
        assert float(v.norm()) <= min(float(w.norm()), 1) * (1 + 1e-6)
        if float(w.norm()) < 1:
            assert torch.equal(v, w)
        else:
            torch.testing.assert_close(v, w / w.norm())


@given(matrices, dims, st.sampled_from(["unit", "bound"]))
def test_projection_is_idempotent(shape, dim, kind):
    once = project_(matrix(shape), Constraint(kind, dim))
    torch.testing.assert_close(project_(once.clone(), Constraint(kind, dim)), once, rtol=1e-6, atol=0)


@given(matrices, dims)
def test_unit_gives_one_along_its_dimension(shape, dim):
    w = project_(matrix(shape), Constraint("unit", dim))
    torch.testing.assert_close(w.norm(dim=dim), torch.ones(w.shape[1 - dim]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["unit", "bound"])
@pytest.mark.parametrize("dim", [0, 1])
def test_zero_vectors_stay_zero(kind, dim):
    assert torch.equal(project_(torch.zeros(3, 4), Constraint(kind, dim)), torch.zeros(3, 4))


@pytest.mark.parametrize("size", [1e-16, 1e-20, 1e-22, 1e-25, 1e-40])
def test_tiny_vectors_do_not_become_long(size):
    lengths = project_(torch.full((2, 64), size), Constraint("unit", 1)).norm(dim=1)
    assert (lengths <= 1.001).all()
    assert size < 1e-18 or (lengths >= 0.999).all()


def test_dimensions_of_each_architecture():
    ngpt = build(angpt.ModelConfig(architecture="ngpt", **TINY)).constraints()
    along_columns = {name.split(".")[-2] for name, c in ngpt.items() if c.dim == 0}
    along_rows = {name.split(".")[-2] for name, c in ngpt.items() if c.dim == 1}
    assert along_columns == {"W_p", "W_d"}
    assert along_rows == {"W_e", "W_h", "W_qkv", "W_uz"}
    assert {c.kind for c in ngpt.values()} == {"unit"}
    ours = build(angpt.ModelConfig(architecture="angpt", **TINY))
    assert set(ours.constraints()) == set(ours.matrices())
    assert set(ours.constraints().values()) == {Constraint("bound", 1)}
    assert build(angpt.ModelConfig(architecture="gpt+", **TINY)).constraints() == {}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("architecture", ["ngpt", "angpt"])
def test_hook_holds_the_constraint_under_any_optimizer(architecture, optimizer):
    model = build(angpt.ModelConfig(architecture=architecture, **TINY))
    optimizer = optimizer(model.parameters(), lr=0.1)
    handle = angpt.constrain(optimizer, model)
    for _ in range(3):
        model(some_tokens(2, 8), some_tokens(2, 8, seed=1)).backward()
        optimizer.step()
        assert largest_violation(model) < 1e-6
    handle.remove()
    optimizer.step()
    assert largest_violation(model) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lengths_of_weights_in_16_bits_are_exact(dtype):
    weight = torch.randn(64, 500, generator=torch.Generator().manual_seed(0))
    weight[:3] *= torch.tensor([0.0, 1e-5, 1e-3])[:, None]  # the squares of the second are zero in fp16
    weight = project_(weight.to(dtype), Constraint("unit", 1))
    lengths = weight.double().norm(dim=1)
    assert lengths[0] == 0
    torch.testing.assert_close(
        lengths[1:], torch.ones_like(lengths[1:]), atol=2e-3 if dtype == torch.bfloat16 else 5e-4, rtol=0
    )
    found = excess(weight, Constraint("bound", 1)).flatten().double()
    torch.testing.assert_close(found, (lengths - 1).clamp(min=0), atol=1e-6, rtol=0)


def test_largest_violation_finds_the_worst_vector():
    model = build(angpt.ModelConfig(architecture="angpt", **TINY))
    with torch.no_grad():
        model.blocks[1].W_d.weight[3] *= 1.5 / model.blocks[1].W_d.weight[3].norm()
        model.blocks[0].W_p.weight *= 0.2  # inside the bound: no violation
    assert largest_violation(model) == pytest.approx(0.5, rel=1e-5)
    apply_constraints(model)
    assert largest_violation(model) < 1e-6


def test_a_network_of_ones_own_is_bounded_by_rows():
    net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2, bias=False))
    with torch.no_grad():
        net[1].weight.fill_(3.0)
    optimizer = torch.optim.Adam(net.parameters())
    angpt.constrain(optimizer, net)
    assert float(norms(net[1].weight.detach(), 1).max()) == pytest.approx(1)
    assert float(norms(net[0].weight.detach(), 1).max()) <= 1 + 1e-6


def test_a_constraint_may_be_given_as_in_a_declaration():
    net = nn.Linear(3, 2)
    apply_constraints(net, {"weight": ("unit", 1)})
    torch.testing.assert_close(net.weight.norm(dim=1), torch.ones(2))


def test_wrong_names_and_dimensions_are_refused():
    net = nn.Linear(3, 3)
    with pytest.raises(angpt.UserError, match="'wieght', which is not a parameter"):
        apply_constraints(net, {"wieght": Constraint("bound", 1)})
    with pytest.raises(angpt.UserError, match="dimension 2 of 'weight'"):
        apply_constraints(net, {"weight": Constraint("bound", 2)})
    with pytest.raises(angpt.UserError, match=r"0\.weight has no shape yet: run a forward pass"):
        largest_violation(nn.Sequential(nn.LazyLinear(3)))


def test_an_unknown_kind_is_refused():
    with pytest.raises(angpt.UserError, match="unknown kind of constraint 'bounded': known: bound, unit"):
        Constraint("bounded", 1)


LAYERS = {
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4),
    "packed attention": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "lstm": lambda: nn.LSTM(5, 8, num_layers=2, bidirectional=True, proj_size=3),
    "gru cell": lambda: nn.GRUCell(5, 8),
    "embedding bag": lambda: nn.EmbeddingBag(7, 5),
    "bilinear": lambda: nn.Bilinear(4, 5, 3),
    "conv1d": lambda: nn.Conv1d(4, 6, 3, groups=2),
    "conv2d": lambda: nn.Conv2d(4, 6, 3),
    "conv3d": lambda: nn.Conv3d(4, 6, 2),
    "linear": lambda: nn.Linear(4, 6),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_every_output_of_a_layer_of_pytorch_is_bounded(layer):
    net = nn.Sequential(LAYERS[layer]())
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(3.0)
    weights = {name: p for name, p in net.named_parameters() if p.ndim > 1}
    assert set(constraints_of(net)) == set(weights)
    assert largest_violation(net) > 2  # sees them before they are projected
    angpt.constrain(torch.optim.SGD(net.parameters()), net)
    for p in weights.values():
        torch.testing.assert_close(p.detach().flatten(1).norm(dim=1), torch.ones(len(p)))
    assert all(float(p.detach().max()) == 3.0 for p in net.parameters() if p.ndim == 1)  # biases are not maps
    assert largest_violation(net) < 1e-6


class Positions(nn.Module):
    """A network with matrices whose outputs no rule knows."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.full((4, 3), 5.0))
        self.up = nn.ConvTranspose1d(3, 2, 2)
        self.down = nn.Linear(3, 3)


def test_parameters_that_are_left_out_are_named():
    net = nn.Sequential(Positions())
    assert left_out(net) == ["0.table", "0.up.weight"]
    line = r"^without a constraint \(give them one, or none, with `constraints`\): 0.table, 0.up.weight$"
    optimizer = torch.optim.SGD(net.parameters())
    for call in (apply_constraints, largest_violation, lambda net: angpt.constrain(optimizer, net)):
        with pytest.warns(UserWarning, match=line) as caught:
            call(net)
        assert [w.filename for w in caught] == [__file__]  # points to the caller's line
    assert float(net[0].table.detach().max()) == 5.0
    chosen = constraints_of(net) | {"0.table": Constraint("bound", 1), "0.up.weight": Constraint("bound", (0, 2))}
    apply_constraints(net, chosen)  # one's own choice is silent
    assert largest_violation(net, chosen) < 1e-6
    torch.testing.assert_close(net[0].table.detach().norm(dim=1), torch.ones(4))


def test_a_long_warning_ends_with_a_number():
    net = nn.ParameterList(torch.ones(2, 2) for _ in range(23))
    with pytest.warns(UserWarning, match=r": 0, 1, .*, 19 and 3 more$"):
        largest_violation(net)


WRAPPERS = {
    "sequence": lambda model: nn.Sequential(nn.Identity(), model),
    "module": nn.DataParallel,
    "compiled": torch.compile,
    "compiled in a sequence": lambda model: nn.Sequential(torch.compile(model)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("architecture", ["gpt+", "ngpt", "angpt"])
def test_a_wrapped_model_keeps_its_declaration(architecture, wrapper):
    model = build(angpt.ModelConfig(architecture=architecture, **TINY))
    wrapped = WRAPPERS[wrapper](model)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.5
    before = copy.deepcopy(model)
    named, names = dict(wrapped.named_parameters()), {p: name for name, p in model.named_parameters()}
    found = {names[named[name]]: constraint for name, constraint in constraints_of(wrapped).items()}
    assert found == dict(model.constraints())
    assert largest_violation(wrapped) == largest_violation(model)
    angpt.constrain(torch.optim.SGD(wrapped.parameters()), wrapped)
    apply_constraints(before)
    for one, other in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_declaration_ends_where_its_model_ends():
    net = nn.Sequential(build(angpt.ModelConfig(architecture="gpt+", **TINY)), nn.Linear(4, 2))
    assert constraints_of(net) == {"1.weight": Constraint("bound", 1)}
    net.constraints = [1, 2]  # an attribute of the same name is no declaration
    assert constraints_of(net) == {"1.weight": Constraint("bound", 1)}


def test_tied_weights_are_constrained_once():
    net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    net[1].weight = net[0].weight
    with torch.no_grad():
        net[0].weight.fill_(3.0)
    angpt.constrain(torch.optim.SGD(net.parameters()), net)
    assert largest_violation(net) < 1e-6
    tied = {"0.weight": Constraint("unit", 1), "1.weight": Constraint("unit", -1)}
    assert largest_violation(net, tied) < 1e-6
    with pytest.raises(angpt.UserError, match=r"0.weight and 1.weight are one tensor with two constraints"):
        largest_violation(net, tied | {"1.weight": Constraint("unit", 0)})


def test_frozen_weights_stay_as_they_are_and_are_named():
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    with torch.no_grad():
        net[0].weight.fill_(3.0)
        net[1].weight.fill_(3.0)
    net[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    line = "^left as they are, because they are frozen: 0.weight$"
    with pytest.warns(UserWarning, match=line):
        angpt.constrain(optimizer, net)
    with pytest.warns(UserWarning, match=line):
        apply_constraints(net)
    assert float(net[0].weight.min()) == 3.0
    assert largest_violation(net) == pytest.approx(5.0)  # a measurement: of all that is there
    net[0].weight.requires_grad_(True)
    optimizer.step()
    assert largest_violation(net) < 1e-6


def test_parameters_of_another_optimizer_stay_as_they_are_and_are_named():
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    with torch.no_grad():
        net[0].weight.fill_(3.0)
    optimizer = torch.optim.SGD(net[1].parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="^left as they are, because this optimizer does not update them: 0.weight$"):
        angpt.constrain(optimizer, net)
    optimizer.step()
    assert float(net[0].weight.detach().min()) == 3.0
    optimizer.add_param_group({"params": net[0].parameters()})
    optimizer.step()
    assert largest_violation(net) < 1e-6


def test_new_parameters_that_the_optimizer_does_not_know_are_named():
    """As after `convert`, which puts learned scales in the place of norms."""
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = torch.optim.SGD(net.parameters())
    net[1] = nn.PReLU(4)
    with pytest.warns(UserWarning, match=r"^not trained by this optimizer, which has others .*: 1\.weight$"):
        angpt.constrain(optimizer, net)


def test_parameters_that_are_replaced_later_are_told():
    """As by `fully_shard` and accelerate, after which the optimizer has other tensors than the projection."""
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    angpt.constrain(optimizer, net)
    net.weight = nn.Parameter(net.weight.detach().clone())
    optimizer.param_groups[0]["params"][0] = net.weight
    with pytest.raises(angpt.UserError, match="call it after `fully_shard` or the `prepare` of accelerate"):
        optimizer.step()


def test_parameters_may_leave_the_optimizer():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD([{"params": part.parameters()} for part in net], lr=1.0)
    with angpt.constrain(optimizer, net, {"0.weight": ["bound", 1]}):
        optimizer.param_groups.pop(0)
        optimizer.step()  # of the rest
    assert not optimizer._optimizer_step_post_hooks


def test_several_optimizers_share_a_network_without_a_warning():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in net]
    handle = angpt.constrain(optimizers, net)
    for optimizer in optimizers:
        net(torch.randn(3, 4)).square().sum().mul(100).backward()
        optimizer.step()
    assert largest_violation(net) < 1e-6
    handle.remove()
    for optimizer in optimizers:
        optimizer.step()
    assert largest_violation(net) > 1


def test_a_further_call_replaces_constraints():
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    angpt.constrain(optimizer, net, {"weight": ("unit", 1)})
    angpt.constrain(optimizer, net)
    with torch.no_grad():
        net.weight.mul_(0.5)
    net(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(net.weight.norm(dim=1), torch.full((4,), 0.5))


def test_tables_of_scalars_are_left_out_with_a_warning():
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.relative_attention_bias, self.offsets = nn.Embedding(32, 4), nn.Embedding(10, 1)
            self.tokens = nn.Embedding(9, 4)

    net = Biased()
    assert left_out(net) == ["relative_attention_bias.weight", "offsets.weight"]
    assert set(constraints_of(net)) == {"tokens.weight"}


@pytest.mark.parametrize(
    "constraints", ["weight", ["weight"], {"weight": "bound"}, {"weight": None}, {"weight": ("bound", "1")}]
)
def test_constraints_of_another_type_are_refused(constraints):
    with pytest.raises(angpt.UserError, match="constraint"):
        apply_constraints(nn.Linear(3, 3), constraints)
    with pytest.raises(angpt.UserError, match=r"of a network \(nn.Module\), not of generator"):
        angpt.constrain(torch.optim.SGD([torch.zeros(1)]), nn.Linear(3, 3).parameters())


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another, without state of its own, as accelerate's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self):
        self.optimizer.step()


class Doubling(torch.optim.Optimizer):
    """An optimizer around another that changes the weights after it."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        for p in self.param_groups[0]["params"]:
            p.mul_(2)


@pytest.mark.parametrize("around", [Wrapper, Doubling])
def test_an_optimizer_around_another_holds_the_constraints(around):
    net = nn.Linear(4, 3)
    optimizer = around(torch.optim.SGD(net.parameters(), lr=5.0))
    angpt.constrain(optimizer, net)
    for _ in range(2):
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert largest_violation(net) < 1e-6


def test_optimizers_of_others_are_refused():
    for optimizer in (None, Wrapper(None), Wrapper(object())):
        with pytest.raises(angpt.UserError, match=r"not (NoneType|object|Wrapper)$"):
            angpt.constrain(optimizer, nn.Linear(4, 3))


@pytest.mark.parametrize("kind", ["unit", "bound"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_vector_that_is_not_finite_is_a_violation(kind, value):
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    with torch.no_grad():
        net[1].weight[1, 1] = value
    declared = {"0.weight": Constraint(kind, 1), "1.weight": Constraint(kind, 1)}
    assert largest_violation(net, declared) == torch.inf
    assert largest_violation(net, dict(reversed(declared.items()))) == torch.inf
    assert excess(net[1].weight, declared["1.weight"]).isfinite().flatten().tolist() == [True, False, True]
    assert largest_violation(nn.Embedding(0, 3)) == 0.0


def pickled(pair):
    return pickle.loads(pickle.dumps(pair))


def saved(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_copy_of_an_optimizer_applies_the_constraints(optimizer, copied):
    net = nn.Linear(4, 3)
    optimizer = optimizer(net.parameters(), lr=1.0)
    handle = angpt.constrain(optimizer, net)
    for generation in range(3):  # a copy of a copy is a copy
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert largest_violation(net) < 1e-6, generation
        net, optimizer = copied((net, optimizer))
    original = torch.optim.SGD(net.parameters(), lr=100.0)
    handle = angpt.constrain(original, net)
    handle.remove()
    net, optimizer = copied((net, original))
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert largest_violation(net) > 1


def on_ranks():
    """The violation before and after a step of each architecture in DDP and FSDP, and what FSDP of old answers."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    torch.distributed.init_process_group("gloo")
    found = {}
    for architecture in ("gpt+", "ngpt", "angpt"):
        for name, wrap in (("ddp", nn.parallel.DistributedDataParallel), ("fsdp", fully_shard)):
            model = build(angpt.ModelConfig(architecture=architecture, **TINY))
            for p in model.matrices().values():
                p.detach().mul_(50)
            wrapped = wrap(model)
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
            angpt.constrain(optimizer, wrapped)
            wrapped(some_tokens(2, 8), some_tokens(2, 8, seed=1)).backward()
            optimizer.step()
            whole = build(angpt.ModelConfig(architecture=architecture, **TINY))
            parts = model.state_dict().items()
            whole.load_state_dict({n: p.full_tensor() if name == "fsdp" else p for n, p in parts})
            rows = {n: Constraint("bound", 1) for n in whole.matrices()}
            found[architecture, name] = (
                largest_violation(wrapped),
                largest_violation(whole),
                largest_violation(whole, rows),
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        old = FullyShardedDataParallel(nn.Linear(8, 8), use_orig_params=True, device_id=torch.device("cpu"))
    try:
        largest_violation(old)
    except angpt.UserError as error:
        found["old"] = str(error)
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.slow
def test_ranks_keep_the_declaration():
    for found in spread(on_ranks, 2):
        assert found.pop("old").endswith("use fully_shard instead")
        for (architecture, _), (sharded, whole, rows) in found.items():
            assert sharded == pytest.approx(whole, abs=1e-6)
            assert whole < 1e-6
            assert (rows > 0.1) == (architecture != "angpt")  # nGPT's columns are constrained, GPT+ is not
