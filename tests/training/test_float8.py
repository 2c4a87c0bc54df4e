"""Runs in 8 bits: what they record, and where they are refused."""

import pytest
import torch

from angpt.errors import UserError
from angpt.fast.precision import low_precision
from angpt.float8 import E4M3
from angpt.models.float8 import Scale, float8_linears
from angpt.training.engine import recompute_blocks
from angpt.training.hardware import check_precision
from angpt.training.launch import start
from angpt.training.layers import float8_scalars
from angpt.training.reporter import Quiet
from angpt.training.run import Run
from tests.optim.test_adam import batches, tiny
from tests.training.conftest import small


def test_a_gpu_without_8_bits_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "RTX 3090")
    with pytest.raises(UserError, match=r"the RTX 3090 has compute capability 8\.6 .* use --precision bf16") as told:
        check_precision(torch.device("cuda"), "fp8")
    assert "\n" not in str(told.value)
    check_precision(torch.device("cuda"), "bf16")
    check_precision(torch.device("cpu"), "fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_precision(torch.device("cuda"), "fp8")


def test_records_need_8_bits(data):
    with pytest.raises(UserError, match="precision = 'fp32'; set it to fp8"):
        small(data, record_fp8=True, precision="fp32")


@pytest.mark.parametrize("architecture", ["gpt+", "ngpt", "angpt"])
def test_records_do_not_change_a_run(data, tmp_path, architecture):
    runs = []
    for on in (False, True):
        out = tmp_path / str(on)
        start(small(data, architecture, precision="fp8", record_fp8=on, layers_every=6), out, Quiet())
        runs.append(list(Run.open(out).records()))
    losses = [[r["loss"] for r in records if r["kind"] == "train"] for records in runs]
    assert losses[0] == losses[1]
    recorded = [r for r in runs[1] if r["kind"] == "fp8"]
    assert [r["step"] for r in recorded] == [0, 6, 12]
    names = {f"{w}_{of}_{what}" for w in ("W_qkv", "W_p", "W_uz", "W_d") for of in ("input", "gradient")
             for what in ("saturated", "zero", "kurtosis")}  # fmt: skip
    for record in recorded:
        assert names < set(record)
        assert {len(record[name]) for name in names} == {2}
        assert all(x == 0 for name in names if name.endswith("input_saturated") for x in record[name])


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_recorded(recompute):
    """Against counts of the converted numbers, layer by layer, at scales that saturate some and lose others."""
    compute, batch = low_precision(tiny("angpt"), E4M3), next(batches(1))
    if recompute:
        recompute_blocks(compute, compiled=False)
    seen = {}
    for name, part in float8_linears(compute):
        part.x_scale = Scale.of(torch.tensor(2.0 ** (14 if name.endswith("W_qkv") else -4)))
        part.register_forward_pre_hook(lambda part, args, name=name: seen.update({name: args[0].detach()}))
    found = float8_scalars(compute, batch)
    assert {len(values) for values in found.values()} == {2}
    assert all(p.grad is None for p in compute.parameters())
    assert all(part.observer is None for _, part in float8_linears(compute))
    for name, part in float8_linears(compute):
        x = seen[name].double()
        scaled = x * part.x_scale.value.item()
        layer, kind = int(name.split(".")[1]), f"{name.split('.')[-1]}_input"
        zero = (scaled.clamp(-448, 448).to(E4M3).double() == 0) & (x != 0)
        assert found[f"{kind}_zero"][layer] == pytest.approx(zero.double().mean().item(), abs=1e-6)
        assert found[f"{kind}_saturated"][layer] == pytest.approx((scaled.abs() > 448).double().mean().item(), abs=1e-6)
        kurtosis = (x**4).mean() / (x**2).mean() ** 2
        assert found[f"{kind}_kurtosis"][layer] == pytest.approx(kurtosis.item(), rel=1e-3)
    assert min(found["W_qkv_input_saturated"]) > 0.1
    assert min(found["W_d_input_zero"]) > 0.1


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_recorded_from_the_first_layer_to_the_last(recompute):
    compute, batch = low_precision(tiny("angpt"), E4M3), next(batches(1))
    if recompute:
        recompute_blocks(compute, compiled=False)
    with torch.no_grad():
        compute.blocks[1].alpha_m.stored.zero_()  # no gradient reaches the MLP of the last layer
    found = float8_scalars(compute, batch)
    assert found["W_d_gradient_zero"][1] == 0
    assert found["W_d_gradient_kurtosis"][0] > 1


def test_records_of_a_compiled_model_do_not_recompile_it():
    """A model that was compiled before its first record, as in a run that resumes, keeps its code."""
    compute, batch = low_precision(tiny("angpt"), E4M3), next(batches(1))
    for block in compute.blocks:
        block.compile(backend="eager", dynamic=False)
    compute(*batch)
    float8_scalars(compute, batch)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compute(*batch)
