"""Everything for speed: Triton kernels, compiler passes, CUDA graphs, low-precision copies.

Importing this package registers the fast form of every operation in `angpt.operations`; Triton is imported at first
use. `--kernels off` or ANGPT_KERNELS=off runs everything on plain PyTorch instead.
"""

from angpt.fast import decode as decode
from angpt.fast import models as models
from angpt.fast import optimizer as optimizer
