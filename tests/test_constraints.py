import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import angpt
from angpt.constraints import Constraint, apply_constraints, largest_violation, norms, project_
from angpt.models.variants import build
from tests.models.conftest import TINY, some_tokens

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


def test_wrong_names_and_dimensions_are_refused():
    net = nn.Linear(3, 3)
    with pytest.raises(angpt.UserError, match="'wieght', which is not a parameter"):
        apply_constraints(net, {"wieght": Constraint("bound", 1)})
    with pytest.raises(angpt.UserError, match="dimension 2 of 'weight'"):
        apply_constraints(net, {"weight": Constraint("bound", 2)})
