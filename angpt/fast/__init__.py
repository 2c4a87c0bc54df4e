"""Faster forms of what `models` and `optim` compute, for GPUs."""

from angpt.fast import optimizer as optimizer
