"""Callbacks that hold the constraints of a model in the trainers of other libraries."""
