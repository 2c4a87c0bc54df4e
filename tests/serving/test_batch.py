import random
from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor

from angpt.fast.decode import by_kernels
from angpt.inference.engine import PromptReader
from angpt.inference.fold import fold
from angpt.inference.generate import generate
from angpt.inference.sampling import GREEDY, Sampling
from angpt.models.folded import Folded, read_prompts
from angpt.serving.batch import Batch, Row
from tests.models.conftest import tiny

HOWS = (
    GREEDY, Sampling(temperature=1.0, top_k=None), Sampling(top_p=0.9), Sampling(min_p=0.05, top_k=None),
    Sampling(repetition_penalty=1.4), Sampling(temperature=0, repetition_penalty=1.4, top_k=None),
)  # fmt: skip


class Replayed:
    """Stands in for a CUDA graph: runs the function again."""

    def __init__(
        self, run: Callable[[], None], warm_up: Callable[[], None], others: Iterable[object], device: torch.device
    ) -> None:
        self.replay = run
        warm_up()


@pytest.mark.parametrize(("name", "recorded"), [("gpt+", False), ("ngpt", False), ("angpt", False), ("angpt", True)])
def test_rows_that_join_and_leave_at_any_time_write_what_they_write_alone(
    name: str, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty texts of different lengths and settings pass through five rows, in float64."""
    monkeypatch.setattr("angpt.serving.batch.record", Replayed)
    monkeypatch.setattr("angpt.inference.engine.record", Replayed)
    model, rng = fold(tiny(name, context=160)), random.Random(1)
    wanted = [
        ([rng.randrange(23) for _ in range(rng.randrange(1, 100))], rng.randrange(1, 60), rng.choice(HOWS), seed)
        for seed in range(30)
    ]
    batch, waiting, found = Batch(model, 5, 160), list(range(30)), dict[int, list[int]]()
    if recorded:
        batch.reader = PromptReader(model.make_caches(1, 160), partial(read_prompts, model), recorded=True)
        batch.recorded = True
    running: dict[int, Row] = {}
    together = set()
    while waiting or running:
        while waiting and len(running) < 5 and rng.random() < 0.6:
            number = waiting.pop(0)
            prompt, _, how, seed = wanted[number]
            running[number] = batch.join(prompt, how, seed)
            found[number] = [running[number].token]
        for number, row in list(running.items()):
            if len(found[number]) == wanted[number][1]:
                batch.leave(row)
                del running[number]
        if running:
            together.add(len(running))
            batch.step()
        for number, row in running.items():
            found[number].append(row.token)
    assert together == {1, 2, 3, 4, 5}
    assert {width for width, _ in batch.graphs} == ({1, 2, 4, 5} if recorded else set())
    assert batch.reader is None or batch.reader.graphs.keys() > {48, 64, 96}
    for number, (prompt, tokens, how, seed) in enumerate(wanted):
        assert found[number] == generate(model, [prompt], tokens, how, seed=seed)[0]


def test_a_batch_can_be_filled_to_the_last_slot() -> None:
    model = fold(tiny("angpt", context=32))
    batch = Batch(model, 2, 32)
    rows = [batch.join([3] * 32, GREEDY, 0), batch.join([3] * 25, GREEDY, 0)]
    assert [rows[0].token] == generate(model, [[3] * 32], 1, GREEDY)[0]
    batch.leave(rows[0])
    tokens = [rows[1].token]
    for _ in range(7):
        batch.step()
        tokens.append(rows[1].token)
    assert tokens == generate(model, [[3] * 25], 8, GREEDY)[0]


@torch.no_grad()
def losses_of_choice(model: Folded, prompt: list[int], tokens: list[int], decode: Callable[..., Tensor]) -> list[float]:
    """By how much the logit of each token is below the largest, relative to the largest magnitude, if the text is
    decoded alone."""
    caches, length = model.make_caches(1, 512), torch.tensor([len(prompt)], device=model.device)
    logits, found = model.prefill(torch.tensor([prompt], device=model.device), length, caches), []
    for token in tokens:
        found.append(float((logits.max() - logits[0, token]) / logits.abs().max()))
        logits = decode(model, torch.tensor([token], device=model.device), length, caches, 512)
        length = length + 1
    return found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_on_a_gpu_write_what_single_steps_write(dtype: torch.dtype) -> None:
    """In fp32 the tokens of plain steps on the CPU; in bf16, up to rounding, the likeliest ones by the kernels for one
    row: the batch has those for up to two rows, and those for many from three on."""
    model: Folded = fold(tiny("angpt", d_model=128, context=512).float())
    prompts = [[1, 2, 3], [4] * 30, [7], [5, 6] * 9, [8] * 200]
    expected = [generate(model, [prompt], 40, GREEDY)[0] for prompt in prompts]
    batch = Batch(model.prepare("cuda", dtype), 5, 512)
    found = []
    for prompt in prompts:  # the batch grows from 1 row to 5
        row = batch.join(prompt, GREEDY, 0)
        found.append((row, [row.token]))
        batch.step()
        for earlier, tokens in found:
            tokens.append(earlier.token)
    while len(found[-1][1]) < 40:
        batch.step()
        for row, tokens in found:
            tokens.append(row.token)
    assert len(batch.graphs) > 2
    if dtype == torch.float32:
        assert [tokens[:40] for _, tokens in found] == expected
    else:
        for prompt, (_, tokens) in zip(prompts, found, strict=True):
            assert max(losses_of_choice(model, prompt, tokens, by_kernels)) <= 0.02
