"""Every number that was tuned for one GPU: tile sizes, warps and programs, measured on an NVIDIA H200 at the shapes of
the 0.5B model. Other values give the same results at another speed. docs/performance.md has the measurements."""

MULTIPROCESSORS = 132
"""Multiprocessors of an H200."""

POINTWISE_BLOCK = 1024
"""Elements per program of SwiGLU and of scaled rows."""

UPDATE_TILE, UPDATE_WARPS = 1024, 2
"""Residual update: elements in registers per program, and warps that share them."""
UPDATE_BACKWARD_TILE, UPDATE_BACKWARD_WARPS = 1024, 2
"""The same for its backward pass and for that of rms."""
UPDATE_BACKWARD_STAGES = 3
"""Software pipeline depth (`num_stages`), for tiles that are not much larger than UPDATE_BACKWARD_TILE."""
UPDATE_BACKWARD_PROGRAMS = 4 * MULTIPROCESSORS

HEADS_TILE, HEADS_WARPS = 1024, 2
"""Heads: elements of q, or of k, in registers per program, and warps that share them."""
HEADS_BACKWARD_TILE, HEADS_BACKWARD_WARPS, HEADS_BACKWARD_STAGES = 2048, 4, 2
HEADS_BACKWARD_PROGRAMS = 8 * MULTIPROCESSORS

LOSS_LANES, LOSS_ELEMENTS, LOSS_WARPS = 512, 8, 16
"""Cross-entropy: lanes per row, logits per lane and loop iteration, warps that share them."""

ADAM_TILE = 2048
"""Adam: elements in registers per program, where a row has no more."""
ADAM_COLUMNS, ADAM_COLUMN_ROWS = 16, 256
"""Adam with constrained columns: columns per program (64 bytes of each row, two memory sectors), rows at a time."""
SQUARES_BLOCK, SQUARES_TILES = 4096, 8
"""Sum of squares: elements per tile, and tiles per program."""

DECODE_READ_ROWS, DECODE_DOWN_ROWS = 8, 4
"""Decode: rows of a matrix per program, few enough for programs on every multiprocessor."""
DECODE_TILE, DECODE_SPLITS = 64, 16
"""Decode: slots of the cache in registers at once, and parts that the slots of a head are divided into at most."""
DECODE_ROWS = 4
"""Decode: largest batch for which the kernels beat matrix products; they read each matrix once per row."""

GRAPH_LAUNCH_SHARE = 0.5
"""A CUDA graph is recorded where launching takes more than this share of a pass: below it Python is never the limit,
above it sometimes, because its speed varies."""
