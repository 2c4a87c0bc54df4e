import os

import hypothesis
import torch

# Machines and their load differ; a slow example is no failure. The same examples everywhere: a red run can be repeated.
hypothesis.settings.register_profile("angpt", deadline=None, derandomize=True)
hypothesis.settings.load_profile("angpt")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # one worker per core already
