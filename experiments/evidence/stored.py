"""The study files beside this module, whose runs are stored by stage in docs/evidence."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

from angpt.serialization import read_toml
from angpt.studies.config import StudyConfig
from angpt.studies.grid import Group, Point
from angpt.studies.search import Loss
from angpt.studies.study import Study

HERE = Path(__file__).resolve().parent


class StoredStudy(Study):
    """A study whose runs are stored elsewhere: its grids grow by their losses."""

    def __init__(self, config: StudyConfig, loss_of: Callable[[str], float | None]) -> None:
        """`loss_of`: the loss of a run by its name; infinite if it diverged, None if it has not ended."""
        super().__init__(Path("studies"), config)
        self.loss_of = loss_of

    def loss(self, group: Group, seeds: Sequence[int], trials: bool = False) -> Loss:
        def loss(batch: int, lr: float) -> float | None:
            names = (self.run_folder(Point(group, batch, lr, seed, trials)).name for seed in seeds)
            losses = [self.loss_of(name) for name in names]
            known = [loss for loss in losses if loss is not None]
            return fmean(known) if len(known) == len(losses) else None

        return loss


@cache
def study_config(file: str) -> StudyConfig:
    return read_toml(StudyConfig, HERE / file)
