import math
from itertools import islice

import pytest
import torch

from angpt.errors import UserError
from angpt.inference.sampling import GREEDY, Sampling, pick, uniforms

LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.9, -3.0, 0.0])


def allowed_by_hand(logits: list[float], how: Sampling, seen: set[int]) -> dict[int, float]:
    """The distribution, restated as loops over a list."""
    scaled = []
    for token, x in enumerate(logits):
        if token in seen:
            x = x / how.repetition_penalty if x > 0 else x * how.repetition_penalty
        scaled.append(x / how.temperature)
    order = sorted(range(len(scaled)), key=lambda t: -scaled[t])
    if how.top_k is not None:
        order = order[: how.top_k]
    weights = {t: math.exp(scaled[t]) for t in order}
    total = sum(weights.values())
    p = {t: w / total for t, w in weights.items()}
    if how.top_p is not None:
        kept, mass = [], 0.0
        for t in order:
            if mass >= how.top_p:
                break
            kept.append(t)
            mass += p[t]
        p = {t: p[t] for t in kept}
    if how.min_p is not None:
        p = {t: x for t, x in p.items() if x >= how.min_p * max(p.values())}
    total = sum(p.values())
    return {t: x / total for t, x in p.items()}


@pytest.mark.parametrize(
    "how",
    [
        Sampling(temperature=1.0, top_k=None),
        Sampling(temperature=0.5, top_k=3),
        Sampling(temperature=1.5, top_k=None, top_p=0.7),
        Sampling(temperature=1.0, top_k=5, top_p=0.9, min_p=0.2),
        Sampling(temperature=1.0, top_k=None, min_p=0.3),
        Sampling(temperature=0.8, top_k=100, repetition_penalty=1.7),
    ],
)
def test_tokens_follow_the_filtered_distribution(how: Sampling) -> None:
    """Uniform numbers on a fine grid reach each token in proportion to its probability."""
    n = 20_000
    grid = (torch.arange(n) + 0.5) / n
    seen = torch.zeros(n, len(LOGITS), dtype=torch.bool)
    seen[:, [0, 1]] = True
    drawn = pick(LOGITS.expand(n, -1), how, grid, seen)
    found = torch.bincount(drawn, minlength=len(LOGITS)) / n
    expected = allowed_by_hand(LOGITS.tolist(), how, {0, 1})
    for token in range(len(LOGITS)):
        assert float(found[token]) == pytest.approx(expected.get(token, 0.0), abs=3 / n)


def test_a_top_k_of_0_keeps_all_tokens() -> None:
    logits, uniform = LOGITS.expand(99, -1), torch.linspace(0, 0.999, 99)
    without, zero = (pick(logits, Sampling(temperature=5.0, top_k=k), uniform).tolist() for k in (None, 0))
    assert zero == without
    assert len(set(zero)) == len(LOGITS)


def test_greedy_takes_the_likeliest_after_the_penalty() -> None:
    assert pick(LOGITS[None], GREEDY, None).tolist() == [0]
    seen = torch.tensor([[True, False, False, False, False, False]])
    how = Sampling(temperature=0, repetition_penalty=1.1)
    assert pick(LOGITS[None], how, torch.zeros(1), seen).tolist() == [3]


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
def test_extreme_penalties_leave_finite_logits(penalty: float) -> None:
    seen, uniform = torch.ones(6, len(LOGITS), dtype=torch.bool), torch.linspace(0, 0.999, 6)
    drawn = pick(1000 * LOGITS.expand(6, -1), Sampling(penalty, 1e-6, top_k=None), uniform, seen)
    assert drawn.tolist() == [0] * 6


@pytest.mark.parametrize("temperature", [1e-40, 1e-38, 1e-20, 1e-7])
@pytest.mark.parametrize("filters", [{"top_k": None}, {"top_k": 3}, {"top_k": None, "top_p": 0.9, "min_p": 0.1}])
def test_tiny_temperatures_are_greedy(temperature: float, filters: dict[str, float]) -> None:
    """Divided by them, logits would be infinite in fp32."""
    logits, uniform = torch.stack([1000 * LOGITS.roll(shift) for shift in range(6)]), torch.linspace(0, 0.999, 6)
    how = Sampling(temperature=temperature, **filters)  # type: ignore[arg-type]
    assert pick(logits, how, uniform).tolist() == [0, 1, 2, 3, 4, 5]


def test_the_largest_uniform_number_reaches_an_allowed_token() -> None:
    almost_one = torch.tensor([1 - 2**-24])
    how = Sampling(temperature=1.0, top_k=None, min_p=0.5)
    logits = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0))
    allowed = (logits - logits.max()).exp()[0] >= 0.5
    assert allowed[pick(logits, how, almost_one)]


def test_exactly_k_tokens_are_left_where_several_share_the_kth_logit() -> None:
    logits = torch.zeros(1000, 10)
    drawn = pick(logits, Sampling(temperature=1.0, top_k=3), torch.rand(1000))
    assert len(set(drawn.tolist())) == 3


def test_uniform_numbers_depend_on_the_seed_alone() -> None:
    first, again, other = (list(islice(uniforms(seed), 600)) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert all(0 <= u < 1 for u in first)
    assert sum(first) / 600 == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1}, {"top_p": 0.0},
        {"top_p": 1.1}, {"min_p": -0.1}, {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-45}, {"repetition_penalty": 1e39}, {"repetition_penalty": math.nan},
    ],
)  # fmt: skip
def test_impossible_settings_are_explained(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(wrong))} must be"):
        Sampling(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="seed"):
        next(uniforms(-1))
