"""Numbers tuned for one GPU, an NVIDIA H200: tile sizes, warps and programs, at the shapes of the 0.5B model.

They change the speed, and the results by rounding: most change the order of sums, DECODE_ROWS the precision of the
inputs of products, FLOAT8_FAST_TERMS and FLOAT8_FAST_OUTPUTS that of sums in 8 bits. docs/performance.md has the
measurements; numbers that were not measured say so.
"""

MULTIPROCESSORS = 132
"""Multiprocessors of an H200."""

POINTWISE_BLOCK = 1024
"""Elements per program of SwiGLU and of scaled rows."""

UPDATE_TILE, UPDATE_WARPS = 1024, 2
"""Residual update: elements in registers per program, and warps that share them."""
UPDATE_BACKWARD_TILE, UPDATE_BACKWARD_WARPS = 1024, 2
"""Backward pass of the residual update and of rms: elements per program, and warps."""
UPDATE_BACKWARD_STAGES = 3
"""Software pipeline depth (`num_stages`), for tiles of up to four times UPDATE_BACKWARD_TILE."""
UPDATE_BACKWARD_PROGRAMS = 4 * MULTIPROCESSORS

HEADS_TILE, HEADS_WARPS = 1024, 2
"""Heads: elements of q, or of k, in registers per program, and warps that share them."""
HEADS_BACKWARD_TILE, HEADS_BACKWARD_WARPS, HEADS_BACKWARD_STAGES = 2048, 4, 2
HEADS_BACKWARD_PROGRAMS = 8 * MULTIPROCESSORS

FLOAT8_TILE, FLOAT8_WARPS = 128, 4
"""Conversion to 8 bits: rows and columns of a tile, and warps."""
FLOAT8_FAST_TERMS, FLOAT8_FAST_OUTPUTS = 1024, 4096
"""Products in 8 bits: up to this many terms of a sum and rows of the matrix, sums are kept in tensor cores
(`use_fast_accum`), which is 3 to 10 % faster. Longer sums would lose too many bits (docs/fp8.md), and with more rows it
is not faster."""
FLOAT8_SWIGLU = {"ROWS": 32, "COLS": 64, "num_warps": 4}
FLOAT8_SWIGLU_BACKWARD = {"ROWS": 64, "COLS": 64, "num_warps": 8}
"""SwiGLU in 8 bits and its gradient: rows and columns of a tile, and warps."""
FLOAT8_HEADS = {"ELEMENTS": 4096, "HEADS": 4, "num_warps": 8}
"""Gradient of heads in 8 bits: elements of a tile of one head, and heads of a program, one after the other."""
FLOAT8_REGISTERS = 128
"""Most registers per thread of the gradient of heads in 8 bits, so that two programs of 8 warps fit on a
multiprocessor. It needs no more (tests/test_compiled.py), but the compiler would use more."""

LOSS_LANES, LOSS_ELEMENTS, LOSS_WARPS = 512, 8, 16
"""Cross-entropy: lanes per row, logits per lane and loop iteration, warps that share them."""

ADAM_TILE = 2048
"""Adam: elements in registers per program, or a whole row if that is longer."""
ADAM_WIDEST = 16_384
"""Adam and the update of Muon: the longest row that fits in registers (tests/test_compiled.py)."""
ADAM_COLUMNS, ADAM_COLUMN_ROWS = 16, 256
"""Adam with constrained columns: columns per program (64 bytes of each row, two memory sectors), rows at a time."""
SQUARES_BLOCK, SQUARES_TILES = 4096, 8
"""Sum of squares: elements per tile, and tiles per program."""

MOMENTUM_BLOCK = 4096
"""Momentum of Muon: elements per program."""
SYMMETRIC_TILE, SYMMETRIC_DEPTH, SYMMETRIC_WARPS, SYMMETRIC_STAGES = 128, 64, 4, 3
"""Symmetric products: rows and columns of a tile, depth per iteration, warps, software pipeline depth."""
SYMMETRIC_SMALL, SYMMETRIC_SMALL_TILE = 512, 64
"""Symmetric products of up to this size: smaller tiles, so that they occupy more multiprocessors."""

DECODE_READ_ROWS, DECODE_DOWN_ROWS = 8, 4
"""Decode: rows of a matrix per program, few enough to occupy every multiprocessor."""
DECODE_TILE, DECODE_SPLITS = 64, 16
"""Decode: slots of the cache in registers at once, and the largest number of splits of the slots of a head."""
DECODE_ATTEND_WARPS = 2
"""Decode: warps that share the slots of a head of 64 dimensions where slots are split (measured for anGPT, 130 to 230
slots, one row); in proportion for larger heads (not measured)."""
DECODE_SHORT, DECODE_WHOLE_SHORT, DECODE_WHOLE = 256, (32, 1, 5), (64, 2, 4)
"""Decode with many rows, attention: the largest short cache in slots; for short and for longer caches the slots in a
tile, the warps (of a head of 64 dimensions) and the software pipeline depth."""
DECODE_ROWS = 2
"""Decode: largest batch for which the kernels that read each matrix once per row beat matrix products."""
DECODE_PROGRAMS = 2 * MULTIPROCESSORS
"""Decode with many rows: programs that a kernel should have, so that all multiprocessors read."""
DECODE_LEAST_DEPTH = 256
"""Decode with many rows: smallest number of columns of a matrix per program, where several share its rows."""
DECODE_ADVANCE_WARPS = 8
"""Decode with many rows: warps of a residual update."""
DECODE_TILES = {16: (64, 128, 4, 4), 32: (32, 256, 4, 4), 64: (32, 64, 4, 4), 128: (32, 64, 8, 4)}
DECODE_SWIGLU_TILES = {16: (16, 512, 4, 3), 32: (16, 256, 4, 4), 64: (16, 64, 4, 4), 128: (16, 64, 8, 4)}
"""Decode with many rows, by the rows of a tile (that of 64 rows is not measured): rows of the matrix (with SwiGLU, of u
and of z), depth per iteration, warps, software pipeline depth."""
DECODE_HELD_ROWS = 16
"""Decode: largest number of rows of a tile for which a program loads the first columns of W_uz into registers before it
waits for its input. Matrices that are read in one iteration are always loaded before the wait."""

PROMPT_GRAPH_TOKENS = 8192
"""Prompts: largest number of tokens of a CUDA graph. With more, computing should take longer than launching; not
measured."""

GRAPH_LAUNCH_SHARE = 0.4
"""A CUDA graph is captured if launching takes more than this share of a pass: above it a pass is launch-bound now and
then, because the speed of Python varies."""
