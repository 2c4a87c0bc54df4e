from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import angpt
from angpt.constraints import constraints_of, largest_violation
from angpt.errors import UserError
from angpt.inference.hf import as_transformers
from angpt.models.variants import ARCHITECTURES
from tests.inference.conftest import byte_model

TOKENS = torch.randint(256, (32, 16), generator=torch.Generator().manual_seed(0))
SAMPLES = [{"input_ids": row, "labels": row} for row in TOKENS]


def exported(name: str = "angpt") -> Any:
    pytest.importorskip("transformers")
    return as_transformers(byte_model(name), torch.device("cpu"), torch.float32)


def fine_tune(model: nn.Module, folder: Path, callbacks: list[Any]) -> None:
    """Five steps of transformers' Trainer, at a rate at which rows grow."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        str(folder), max_steps=5, learning_rate=0.05, per_device_train_batch_size=4, use_cpu=True, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    Trainer(model=model, args=args, train_dataset=SAMPLES, callbacks=callbacks).train()


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_an_export_declares_the_constraints_of_its_architecture(name: str) -> None:
    assert constraints_of(exported(name)) == byte_model(name).constraints()


@pytest.mark.parametrize("name", ["angpt", "ngpt"])
def test_the_callback_of_transformers_holds_the_constraints(tmp_path: Path, name: str) -> None:
    from angpt.integrations.transformers import ConstrainCallback

    free, bound = exported(name), exported(name)
    fine_tune(free, tmp_path, [])
    fine_tune(bound, tmp_path, [ConstrainCallback()])
    assert largest_violation(free) > 0.05
    assert largest_violation(bound) < 1e-6
    assert not torch.equal(bound.W_h.weight, exported(name).W_h.weight)


def test_a_converted_llama_is_trained_under_its_bound_saved_and_loaded(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from angpt.integrations.transformers import ConstrainCallback

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **sizes))
    angpt.convert(model)
    fine_tune(model, tmp_path / "trainer", [ConstrainCallback()])
    assert largest_violation(model) < 1e-6
    model.eval().save_pretrained(tmp_path / "saved")
    again = angpt.converted(transformers.LlamaForCausalLM).from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_what_the_callback_cannot_constrain_is_said(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from angpt.integrations.transformers import ConstrainCallback

    adapted = peft.get_peft_model(exported(), peft.LoraConfig(r=2, target_modules=["W_p"]))
    with pytest.warns(UserWarning, match=r"frozen: .*blocks\.0\.W_p\.base_layer\.weight"):
        fine_tune(adapted, tmp_path, [ConstrainCallback()])
    with pytest.raises(UserError, match="needs an optimizer of PyTorch"):
        ConstrainCallback().on_train_begin(None, None, None, model=exported(), optimizer=None)


@pytest.mark.filterwarnings("ignore")  # Lightning's own, of PyTorch and of this small example
def test_the_callback_of_lightning_holds_the_constraints(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from angpt.integrations.lightning import ConstrainCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 3)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return -self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    data = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4)
    lengths = []
    for callbacks in ([], [ConstrainCallback()]):
        torch.manual_seed(0)
        module = Module()
        trainer = lightning.Trainer(
            max_epochs=2, callbacks=callbacks, default_root_dir=tmp_path, enable_model_summary=False, **quiet
        )
        trainer.fit(module, data)
        lengths.append(float(module.net.weight.norm(dim=1).max()))
    assert lengths[0] > 1.1
    assert lengths[1] == pytest.approx(1.0, abs=1e-6)
