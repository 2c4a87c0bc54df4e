from functools import wraps

import pytest
import torch

from angpt.config import ModelConfig, OptimizerConfig
from angpt.data.loader import Batch
from angpt.float8 import E4M3, WEIGHT_SCALE, to_e4m3
from angpt.models.float8 import float8_linears
from angpt.models.variants import build
from angpt.training.engine import Engine
from angpt.training.gathering import GatheredInE4M3
from angpt.training.strategy import choose_strategy
from tests.training.ranks import spread


def tiny(architecture, d_ff=3):
    cfg = ModelConfig(architecture, d_model=20, n_layers=2, n_heads=1, d_ff=d_ff, vocab_size=53, context=16)
    return build(cfg, seed=1)


def gathered(architecture):
    """Of each matrix of the first block, while it is gathered: its values, the bytes that this rank has sent, and those
    of its storage. And the dtype of the rows of this rank."""
    sent = {}
    send = GatheredInE4M3.fsdp_pre_all_gather

    @wraps(send)  # FSDP looks at the arguments
    def counted(self, *args):
        values, metadata = send(self, *args)
        sent[self.owner] = values[0].nbytes
        return values, metadata

    GatheredInE4M3.fsdp_pre_all_gather = counted
    with choose_strategy(torch.device("cpu"), "fsdp", None, timeout=300) as strategy:
        model = strategy.prepare(tiny(architecture), E4M3, wide_reduce=False)
        block, found = model.blocks[0], {}
        for _ in range(2):  # the first time is another path
            block.unshard()
            for name, part in float8_linears(block):
                values = None if part.values is None else part.values.float().numpy()
                found[name] = values, sent.get(part), part.weight.untyped_storage().nbytes()
            block.reshard()
        return found, {name: strategy.local(part.weight).dtype for name, part in float8_linears(block)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_bounded_matrices_travel_in_8_bits(ranks):
    """Six rows of W_uz on four ranks are 2, 2, 2, 0: all send as many."""
    matrices = dict(tiny("angpt").blocks[0].named_parameters())
    for found, dtypes in spread(gathered, ranks, "angpt"):
        assert found.keys() == {"W_qkv", "W_p", "W_uz", "W_d"}
        for name, (values, sent, stored) in found.items():
            matrix = matrices[f"{name}.weight"].detach()
            assert (values == to_e4m3(matrix, WEIGHT_SCALE).float().numpy()).all()
            assert sent == -(-len(matrix) // ranks) * matrix.shape[1]
            assert stored == 2  # the weight that receives the gradient is one zero
        assert set(dtypes.values()) == {torch.float32}  # what the optimizer works on


def test_unbounded_ones_are_gathered_in_bf16():
    found, _ = spread(gathered, 2, "gpt+")[0]
    assert all(values is None and sent is None for values, sent, _ in found.values())
    assert found["W_p"][2] == 2 * 20 * 20


def trained(dtype):
    """Rows of matrices of blocks that two steps have not changed, by name."""
    with choose_strategy(torch.device("cpu"), "fsdp", None, timeout=300) as strategy:
        model = tiny("angpt", d_ff=5)
        before = {name: p.detach().clone() for name, p in model.blocks.named_parameters() if p.ndim == 2}
        engine = Engine(model, OptimizerConfig(), dtype, False, strategy=strategy)
        tokens = torch.arange(48).view(3, 16)
        for number in (1, 2):
            engine.backward(Batch(tokens, tokens.flip(1), None), 3)
            engine.step(number, lr=0.1)
        after = {name: model.blocks.get_parameter(name).full_tensor() for name in before}
        return {name: (after[name] == before[name]).all(dim=1).nonzero().flatten().tolist() for name in before}


@pytest.mark.parametrize("dtype", [torch.float32, E4M3])
def test_every_row_of_uneven_shards_is_trained(dtype):
    """Ten rows of W_uz on four ranks are 3, 3, 3, 1."""
    for unchanged in spread(trained, 4, dtype):
        assert len(unchanged) == 8
        assert not any(unchanged.values()), unchanged
