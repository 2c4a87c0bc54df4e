"""Approximately normalized transformers: GPT+, nGPT and anGPT, and their building blocks."""

import importlib
from typing import TYPE_CHECKING, Any

from angpt.version import __version__

if TYPE_CHECKING:
    from angpt.config import SIZES as SIZES
    from angpt.config import ModelConfig as ModelConfig
    from angpt.constraints import Constraint as Constraint
    from angpt.constraints import apply_constraints as apply_constraints
    from angpt.constraints import constrain as constrain
    from angpt.constraints import constraints_of as constraints_of
    from angpt.constraints import largest_violation as largest_violation
    from angpt.constraints import left_out as left_out
    from angpt.errors import UserError as UserError
    from angpt.inference.fold import fold as fold
    from angpt.inference.generate import generate as generate
    from angpt.inference.sampling import Sampling as Sampling
    from angpt.models.convert import Conversion as Conversion
    from angpt.models.convert import Description as Description
    from angpt.models.convert import convert as convert
    from angpt.models.convert import converted as converted
    from angpt.models.factors import constants as constants
    from angpt.models.factors import nu_lerp as nu_lerp
    from angpt.models.factors import nu_linear as nu_linear
    from angpt.models.parts import AnResidual as AnResidual
    from angpt.models.parts import ScaledHead as ScaledHead
    from angpt.models.parts import init_unit_rows_ as init_unit_rows_
    from angpt.models.parts import mlp_factor as mlp_factor
    from angpt.models.primitives import LearnedScale as LearnedScale
    from angpt.models.primitives import lerp as lerp
    from angpt.models.primitives import norm as norm
    from angpt.models.primitives import rms as rms
    from angpt.models.variants import ARCHITECTURES as ARCHITECTURES
    from angpt.models.variants import build as build
    from angpt.optim.standalone import Muon as Muon

# Imported at first use, so that `angpt --help` does not wait for torch.
_PUBLIC = {
    "config": ("SIZES", "ModelConfig"),
    "constraints": ("Constraint", "apply_constraints", "constrain", "constraints_of", "largest_violation", "left_out"),
    "errors": ("UserError",),
    "inference.fold": ("fold",),
    "inference.generate": ("generate",),
    "inference.sampling": ("Sampling",),
    "models.convert": ("Conversion", "Description", "convert", "converted"),
    "models.factors": ("constants", "nu_lerp", "nu_linear"),
    "models.parts": ("AnResidual", "ScaledHead", "init_unit_rows_", "mlp_factor"),
    "models.primitives": ("LearnedScale", "lerp", "norm", "rms"),
    "models.variants": ("ARCHITECTURES", "build"),
    "optim.standalone": ("Muon",),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'angpt' has no attribute {name!r}")
    if _HOME[name].startswith(("models", "optim")):
        importlib.import_module("angpt.fast")  # registers the kernels
    return getattr(importlib.import_module(f"angpt.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
