import os
import signal

import hypothesis
import pytest
import torch

from tests.slurm import CannotStart, local_slurm

# Machines and their load differ; a slow example is no failure. The same examples everywhere: a red run can be repeated.
hypothesis.settings.register_profile("angpt", deadline=None, derandomize=True)
hypothesis.settings.load_profile("angpt")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # see triton_anywhere; before anything imports Triton
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # started with `&` or nohup; commands would inherit it
torch.set_num_threads(1)  # the models of tests are so small that threads only wait for each other


def _slurm(nodes):
    try:
        with local_slurm(nodes) as slurm:
            yield slurm
    except CannotStart as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def slurm():
    """A real SLURM of one node."""
    yield from _slurm(1)


@pytest.fixture(scope="session")
def slurm_of_two_nodes():
    """The same with two emulated nodes on this machine."""
    yield from _slurm(2)
