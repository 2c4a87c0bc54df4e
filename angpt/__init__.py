"""Approximately normalized transformers: train, compare and evaluate GPT+, nGPT and anGPT; their building blocks."""

import importlib
from typing import TYPE_CHECKING, Any

from angpt.version import __version__

if TYPE_CHECKING:
    from angpt.api import RunsFailed as RunsFailed
    from angpt.api import StudyOutcome as StudyOutcome
    from angpt.api import TrainedRun as TrainedRun
    from angpt.api import compare as compare
    from angpt.api import export as export
    from angpt.api import fit_hparams as fit_hparams
    from angpt.api import fit_scaling as fit_scaling
    from angpt.api import load as load
    from angpt.api import prepare as prepare
    from angpt.api import report as report
    from angpt.api import study as study
    from angpt.api import train as train
    from angpt.config import SIZES as SIZES
    from angpt.config import DataConfig as DataConfig
    from angpt.config import ModelConfig as ModelConfig
    from angpt.config import OptimizerConfig as OptimizerConfig
    from angpt.config import PrepareConfig as PrepareConfig
    from angpt.config import TrainConfig as TrainConfig
    from angpt.config import preset as preset
    from angpt.constraints import Constraint as Constraint
    from angpt.constraints import apply_constraints as apply_constraints
    from angpt.constraints import constrain as constrain
    from angpt.constraints import constraints_of as constraints_of
    from angpt.constraints import largest_violation as largest_violation
    from angpt.constraints import left_out as left_out
    from angpt.errors import UserError as UserError
    from angpt.evaluation.evaluate import evaluate as evaluate
    from angpt.fits.output import fit_tables as fit_tables
    from angpt.fits.output import write_fit as write_fit
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
    from angpt.results import Result as Result
    from angpt.slurm import SlurmConfig as SlurmConfig
    from angpt.studies.compare import Comparison as Comparison
    from angpt.studies.config import Grid as Grid
    from angpt.studies.config import Shape as Shape
    from angpt.studies.config import StudyConfig as StudyConfig
    from angpt.training.reporter import TrainProgress as TrainProgress

# Imported at first use, so that `angpt --help` does not wait for torch.
_PUBLIC = {
    "api": (
        "RunsFailed",
        "StudyOutcome",
        "TrainedRun",
        "compare",
        "export",
        "fit_hparams",
        "fit_scaling",
        "load",
        "prepare",
        "report",
        "study",
        "train",
    ),
    "config": (
        "SIZES",
        "DataConfig",
        "ModelConfig",
        "OptimizerConfig",
        "PrepareConfig",
        "TrainConfig",
        "preset",
    ),
    "constraints": ("Constraint", "apply_constraints", "constrain", "constraints_of", "largest_violation", "left_out"),
    "errors": ("UserError",),
    "evaluation.evaluate": ("evaluate",),
    "fits.output": ("fit_tables", "write_fit"),
    "inference.fold": ("fold",),
    "inference.generate": ("generate",),
    "inference.sampling": ("Sampling",),
    "models.convert": ("Conversion", "Description", "convert", "converted"),
    "models.factors": ("constants", "nu_lerp", "nu_linear"),
    "models.parts": ("AnResidual", "ScaledHead", "init_unit_rows_", "mlp_factor"),
    "models.primitives": ("LearnedScale", "lerp", "norm", "rms"),
    "models.variants": ("ARCHITECTURES", "build"),
    "optim.standalone": ("Muon",),
    "results": ("Result",),
    "slurm": ("SlurmConfig",),
    "studies.compare": ("Comparison",),
    "studies.config": ("Grid", "Shape", "StudyConfig"),
    "training.reporter": ("TrainProgress",),
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
