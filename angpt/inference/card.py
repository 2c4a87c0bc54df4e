"""The model card of an export: what the run records about the model, its data, its training and its evaluation."""

from collections.abc import Sequence
from pathlib import Path

from angpt.config import TrainConfig
from angpt.data.shards import INDEX, Index
from angpt.inference.source import Source
from angpt.models.decoder import Decoder
from angpt.present.words import without_html
from angpt.training.run import Run
from angpt.version import __version__

Evaluation = Sequence[tuple[str, str, str, str]]
"""What a model was evaluated on, the metric, the number of samples, the value."""


def model_card(
    source: Source, model: Decoder, config: TrainConfig | None, evaluation: Evaluation = (), engine: bool = False
) -> str:
    """The README.md of an export; `engine`: of one whose head is folded, which is neither imported nor trained."""
    kinds = {constraint.kind for constraint in model.constraints().values()}
    held = "at length 1" if kinds == {"unit"} else "within length 1"
    return without_html(
        CARD.format(
            name=source.path.resolve().name,
            version=__version__,
            table=rows(model_facts(source, model) + training_facts(source, config)),
            data=rows(data_facts(config)) if config is not None else "The data were not recorded.",
            evaluation=evaluation_text(source, evaluation),
            limitations=limitations(source, model),
            form=FOR_ENGINES if engine else "`angpt import hf` turns the folder into a run again.",
            fine_tuning=FINE_TUNING.format(held=held) if model.constraints() and not engine else "",
        )
    )


def rows(facts: Sequence[Sequence[str]]) -> str:
    """A table without a heading."""
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts)])


def model_facts(source: Source, model: Decoder) -> list[tuple[str, str]]:
    cfg = source.cfg
    return [
        ("architecture", cfg.architecture),
        ("parameters", f"{model.parameter_count():,}"),
        ("width, layers, heads, MLP", f"{cfg.d_model}, {cfg.n_layers}, {cfg.n_heads}, {cfg.d_mlp}"),
        ("context", f"{cfg.context:,}"),
        ("vocabulary", f"{cfg.vocab_size:,}"),
        ("SHA-256 of the weights", f"`{source.sha256()}`"),
    ]


def training_facts(source: Source, config: TrainConfig | None) -> list[tuple[str, str]]:
    training, found = source.training, []
    if training.step is not None:
        tokens = "" if training.tokens is None else f" ({training.tokens:,} tokens)"
        found.append(("trained for", f"{training.step:,} steps{tokens}"))
    if config is not None:
        found += [("seed", str(config.seed)), ("optimizer", config.optimizer.name.capitalize())]
        found += [("peak learning rate", f"{config.optimizer.lr:g}")] if config.optimizer.lr else []
    summary = Run.open(source.path).summary() if source.kind == "run" else None
    if summary is not None:
        found += [("status", summary.status), ("training time", f"{summary.seconds:,.0f} s")]
        names = ("cpu", "gpu", "torch", "commit")
        found += [(key, value) for key, value in summary.environment.items() if key in names]
    return found


def data_facts(config: TrainConfig) -> list[tuple[str, str]]:
    """The folder of the data, and what its index says about them if it still exists."""
    folder, found = Path(config.data.path), [("folder", config.data.path)]
    if (folder / INDEX).exists():
        index = Index.read(folder)
        found += [("sources", ", ".join(index.recipe.sources)), ("tokenizer", index.recipe.tokenizer)]
        sizes = {"training split": index.train, "validation split": index.val}
        found += [(name, f"{s.tokens:,} tokens, {s.documents:,} documents") for name, s in sizes.items()]
    return found


def evaluation_text(source: Source, evaluation: Evaluation) -> str:
    loss = source.training.val_loss
    known = [] if loss is None else [("validation split of its data", "loss", "", f"{loss:.4f}")]
    if not (found := [*known, *evaluation]):
        return "The model was not evaluated."
    table = ["| evaluated on | metric | size | value |", "|---|---|---|---|", *(f"| {' | '.join(r)} |" for r in found)]
    return "\n".join(table)


def limitations(source: Source, model: Decoder) -> str:
    tokens, count = source.training.tokens, model.parameter_count()
    seen = "" if tokens is None else f" It has seen {tokens:,} tokens, {tokens / count:.3g} per parameter."
    return (
        "A base model: it continues text, and was not trained to follow instructions."
        f"{seen} Texts longer than {source.cfg.context:,} tokens did not occur in training. "
        "It repeats what its data contain; bias and safety were not measured."
    )


FOR_ENGINES = (
    "The folder was written for engines that run transformers' models: learned scales of the logits are part of "
    "`lm_head`. It cannot be imported again by angpt, and should not be trained further."
)
FINE_TUNING = """
## Fine-tuning

The weights were trained with vectors that are kept {held}, which other trainers do not do by themselves.
With angpt installed, a callback of transformers' Trainer or of Lightning's Trainer does it:

```python
from angpt.integrations.transformers import ConstrainCallback  # or angpt.integrations.lightning

trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[ConstrainCallback()])
```

In a training loop of your own: `angpt.constrain(optimizer, model)`.
"""

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [angpt]
license: unknown
---

# {name}

A language model trained and exported with angpt {version}, based on the paper
"Learning in Compact Spaces with Approximately Normalized Transformer", Franke et al., 2025.

{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))
```

`modeling_angpt.py` is the whole model. {form}
{fine_tuning}
## Data

{data}

## Evaluation

{evaluation}

## Limitations

{limitations}

## Licence

`modeling_angpt.py` is part of angpt, under the Apache License 2.0. The run does not record a licence of the weights,
which may depend on that of the data: replace `license: unknown` above when you publish them.

## Citation

```bibtex
@inproceedings{{franke2025compact,
  title = {{Learning in Compact Spaces with Approximately Normalized Transformer}},
  author = {{Franke, J{{\\"o}}rg K. H. and Spiegelhalter, Urs and Nezhurina, Marianna and Jitsev, Jenia and
            Hutter, Frank and Hefenbrock, Michael}},
  booktitle = {{Advances in Neural Information Processing Systems}},
  year = {{2025}},
  note = {{arXiv:2505.22014}},
}}
```
"""
