"""Writes docs/table1.md: each row of the paper's Table 1 with the line of code that computes it, for each column.

The model files carry the formula as a comment at the end of the line; a formula without its line is an error.
"""

import inspect
from pathlib import Path
from types import ModuleType

from angpt.models import angpt, gptplus, ngpt

COLUMNS: dict[str, ModuleType] = {"GPT+": gptplus, "nGPT": ngpt, "anGPT": angpt}

NONE = ""
ROWS: list[tuple[str, tuple[str, str, str]]] = [
    ("Embed", ("h ← W_e x_in",) * 3),
    ("MHA", ("h_a ← rms(h) · γ_a", NONE, NONE)),
    ("MHA", ("q, k, v ← W_qkv h_a", "q, k, v ← W_qkv h", "q, k, v ← W_qkv h · ν_qkv")),
    ("MHA", ("k, q ← norm(k), norm(q)", "k, q ← norm(k) · s_k, norm(q) · s_q", "k, q ← norm(k), norm(q)")),
    ("MHA", ("A ← softmax(q kᵀ · g)", "A ← softmax(q kᵀ · √d_k)", "A ← softmax(q kᵀ · g)")),
    ("MHA", ("h_a ← W_p (A v)", "h_a ← W_p (A v)", "h_a ← W_p (A v) · ν_p")),
    ("MHA", (NONE, "h_a ← norm(h_a)", "h_a ← norm(h_a)")),
    ("Residual", ("h ← h + h_a", "h ← norm(h + α_a (h_a − h))", "h ← (h + α_a (h_a − h)) · ν(α_a)")),
    ("MLP", ("h_m ← rms(h) · γ_m", NONE, NONE)),
    ("MLP", ("u, z ← W_uz h_m", "u, z ← W_uz h", "u, z ← W_uz h · ν_uz")),
    ("MLP", (NONE, "u ← u · s_u", NONE)),
    ("MLP", (NONE, "z ← z · s_z · √d", NONE)),
    ("MLP", ("h_m ← u · SiLU(z)", "h_m ← u · SiLU(z)", "h_m ← u · SiLU(z) · ν_acf")),
    ("MLP", ("h_m ← W_d h_m", "h_m ← W_d h_m", "h_m ← W_d h_m · ν_d")),
    ("MLP", (NONE, "h_m ← norm(h_m)", "h_m ← norm(h_m)")),
    ("Residual", ("h ← h + h_m", "h ← norm(h + α_m (h_m − h))", "h ← (h + α_m (h_m − h)) · ν(α_m)")),
    ("Head", ("h ← rms(h) · γ_h", NONE, NONE)),
    ("Head", ("logits ← W_h h", "logits ← s_Z · (W_h h)", "logits ← s_Z · (W_h h)")),
]
"""Table 1 of the paper, as the model files write it."""

HEADER = """# Table 1, row by row

Generated from the three model files by `python -m angpt.models.table1`. Each cell: the formula of the paper, and the
line of code that computes it. `W(x, s)` is (W x) · s; q and k are rotated (RoPE) before their norm.
"""


def code_lines(module: ModuleType) -> dict[str, tuple[int, str]]:
    """The lines of a model file that carry a formula: formula → (line number, code)."""
    found: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(inspect.getsource(module).splitlines(), start=1):
        code, mark, formula = line.partition("  # ")
        if mark and "←" in formula:
            if formula in found:
                raise ValueError(f"{module.__name__}:{number}: {formula!r} is also in line {found[formula][0]}")
            found[formula] = (number, code.strip().rstrip(","))
    return found


def generate() -> str:
    """The text of docs/table1.md."""
    lines = {column: code_lines(module) for column, module in COLUMNS.items()}
    out = [HEADER, "| | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    previous = ""
    for part, formulas in ROWS:
        cells = []
        for (column, module), formula in zip(COLUMNS.items(), formulas, strict=True):
            if formula and formula not in lines[column]:
                raise ValueError(f"{module.__name__} has no line for {formula!r}")
            cells.append(_cell(module, formula, *lines[column].pop(formula)) if formula else "")
        out.append(f"| {part if part != previous else ''} | " + " | ".join(cells) + " |")
        previous = part
    for column, left in lines.items():
        if left:
            raise ValueError(f"{COLUMNS[column].__name__} has formulas that are not in Table 1: {sorted(left)}")
    return "\n".join(out) + "\n"


def _cell(module: ModuleType, formula: str, number: int, code: str) -> str:
    name = module.__name__.rpartition(".")[2]
    return f"{formula}<br>[`{code.replace('|', '&#124;')}`](../angpt/models/{name}.py#L{number})"


if __name__ == "__main__":
    target = Path(__file__).parents[2] / "docs" / "table1.md"
    target.parent.mkdir(exist_ok=True)
    target.write_text(generate(), encoding="utf-8")
    print(f"wrote {target}")
