"""Names and sizes of an analysis, which `--help` shows: without imports, so that it is there at once."""

PARTS = ("norms", "factors", "learned", "moments", "robustness", "attention")
"""Parts of an analysis of runs."""
TOY = "toy"
"""The examples of the paper's section 3, which need no run."""
TOKENS = 16_384
"""Validation tokens to measure on: seconds on a laptop, with an error of the means below 1 %."""
