"""Faster forms of what `models` and `optim` compute, for GPUs."""
