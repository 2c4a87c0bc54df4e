"""Compiles kernels for a GPU that need not be there, and says what became of them: `python -m tests.compiled`.

A process of its own, because tests have Triton interpret kernels. Prints JSON: stack and registers of a thread, bytes
of shared memory, and the instructions that load from memory, by their kind.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
BF16, FP32, I64, FP8 = "*bf16", "*fp32", "*i64", "*fp8e4nv"


def build(kernel, types: dict[str, str], num_warps: int, **constants) -> dict:
    """All pointers and the integers of `types` are multiples of 16."""
    names = kernel.arg_names
    rest = {name: "fp32" for name in names if name not in types and name not in constants}
    signature = {name: "constexpr" if name in constants else (types | rest)[name] for name in names}
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in types},
    )
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": num_warps})
    asm = compiled.asm
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name.lower(): int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", usage)}
    loads = Counter(re.findall(r"ld\.global\S*?\.((?:v\d\.)?b\d+)", asm["ptx"]))
    ahead = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (0x\w+)", asm["ptx"])
    found["shared"] = compiled.metadata.shared
    return found | {"loads": loads + Counter({4: "b32", 8: "v2.b32", 16: "v4.b32"}[int(size, 16)] for size in ahead)}


def training() -> dict[str, dict]:
    from angpt.fast import muon_kernels as muon
    from angpt.fast import optimizer_kernels as k
    from angpt.fast.tuning import ADAM_WIDEST

    tables = {"table_ptr": I64, "programs_ptr": I64, "clip_ptr": FP32}
    types = tables | {"n_cols": "i32"}
    low = {"LOW": tl.bfloat16, "LOW_SCALE": 1.0}
    adam = low | {"ADAM": True, "CONSTRAINED": True, "UNIT": True, "COPY": True, "TINY": 1e-30, "KIND": tl.bfloat16}
    sums = {"KIND": tl.bfloat16, "EVEN": True, "BLOCK": k.BLOCK, "TILES": k.BLOCKS}
    return {
        **{
            f"rows of {width}": build(k._step_rows, types, 8, **adam, ROWS=max(1, k.TILE // width), COLS=width)
            for width in (1024, 4096, ADAM_WIDEST)
        },
        "columns": build(k._step_columns, types, 8, **adam, ROWS=k.DOWN, COLS=k.COLUMNS),
        "rows with a copy in e4m3": build(
            k._step_rows, types, 8, **adam | {"LOW": tl.float8e4nv, "LOW_SCALE": 256.0}, ROWS=2, COLS=1024
        ),
        "momentum": build(muon._momentum, tables, 8, KIND=tl.float32, OUT=tl.bfloat16, EVEN=True, BLOCK=muon.BLOCK),
        "squares": build(k._squares, {"table_ptr": I64, "programs_ptr": I64, "sums_ptr": FP32}, 8, **sums),
    }


def models() -> dict[str, dict]:
    from angpt.fast import block_kernels as k
    from angpt.fast import float8_kernels as float8
    from angpt.fast import head_kernels as heads
    from angpt.fast import loss_kernels as loss

    logits = {"logits_ptr": BF16, "targets_ptr": I64, "losses_ptr": FP32, "count_ptr": FP32, "width": "i32"}
    pair = {"uz_ptr": BF16, "width": "i32"}
    rows = {"w_ptr": BF16, "scale_ptr": FP32, "width": "i32"}
    stream = {"h_ptr": BF16, "x_ptr": BF16, "alpha_ptr": FP32, "n_rows": "i32", "width": "i32"}
    stream_back = stream | {"dy_ptr": BF16, "dh_ptr": BF16, "dx_ptr": BF16, "terms_ptr": FP32}
    norm_back = dict.fromkeys(("x_ptr", "dy_ptr", "total_ptr", "dx_ptr"), BF16)
    norm_back |= {"gain_ptr": FP32, "terms_ptr": FP32, "n_rows": "i32", "width": "i32"}
    lerp = {"NU": True, "TIMES": 1.0, "NORMED": False, "EPS": 1e-20}
    packed = {"qkv_ptr": BF16, "cos_ptr": FP32, "sin_ptr": FP32, "q_gain_ptr": FP32, "k_gain_ptr": FP32}
    packed |= {"n_tokens": "i32", "heads": "i32", "period": "i32"}
    packed_back = packed | dict.fromkeys(("dq_ptr", "dk_ptr", "dv_ptr", "dqkv_ptr"), BF16)
    packed_back |= {"q_terms_ptr": FP32, "k_terms_ptr": FP32}
    normed = {"Q_GAIN": True, "K_GAIN": True, "EPS": 1e-20, "HALF": 16}
    lanes = {"LANES": loss.LANES, "EACH": loss.EACH}
    unit, square = {"BLOCK": k.BLOCK}, {"LARGEST": 448.0, "TILE": float8.TILE}
    bytes_ = {"scale_ptr": FP32, "y_ptr": FP8, "t_ptr": FP8, "n_rows": "i32", "n_cols": "i32"}
    return {
        "cross-entropy": build(loss._cross_entropy, logits, loss.WARPS, GRADIENT=True, **lanes),
        "swiglu": build(k._swiglu, pair | {"h_ptr": BF16}, 4, FACTOR=1.0, **unit),
        "swiglu backward": build(k._swiglu_backward, pair | {"dh_ptr": BF16, "duz_ptr": BF16}, 4, FACTOR=1.0, **unit),
        "update": build(k._update, stream | {"y_ptr": BF16}, **lerp, **k._tile(1024, k.TILE, k.WARPS)),
        **{
            f"update backward, {width}": build(k._update_backward, stream_back, **lerp, **k._tile_back(width))
            for width in (1024, 4096, 16384)
        },
        **{
            f"rms backward, {width}": build(k._rms_backward, norm_back, ADD=True, EPS=1e-20, **k._tile_back(width))
            for width in (1024, 4096, 16384)
        },
        "heads": build(
            heads._heads,
            packed | {"q_ptr": BF16, "k_ptr": BF16},
            **normed,
            **heads._shape(16, 64, heads.TILE, heads.WARPS),
        ),
        **{
            f"heads backward, {n} of {d}": build(
                heads._heads_backward, packed_back, **normed, **heads._shape_back(n, d)
            )
            for n, d in ((16, 64), (32, 128), (40, 128))
        },
        "quantize": build(float8._quantize, bytes_ | {"x_ptr": BF16}, float8.WARPS, CONVERT=True, **square),
        "transpose": build(float8._quantize, bytes_ | {"x_ptr": FP8}, float8.WARPS, CONVERT=False, **square),
        "scaled rows": build(k._scale_rows, rows | {"y_ptr": BF16}, 4, **unit),
        "scaled rows backward": build(k._scale_rows_backward, rows | {"g_ptr": BF16, "dscale_ptr": FP32}, 4, **unit),
    }


def inference() -> dict[str, dict]:
    from angpt.fast import decode_kernels as k

    stream = dict.fromkeys(("h_ptr", "x_ptr", "keep_ptr", "add_ptr", "out_ptr", "y_ptr"), FP32)
    sizes = {"n": "i32", "d": "i32"}
    seen = {"LERP": True, "OUTPUT_NORM": True, "UPDATE_NORM": False, "INPUT_NORM": False, "EPS": 1e-20, "OVERLAP": True}
    found = {}
    for width, mlp in ((1024, 4096), (2048, 8192)):  # the 0.5B and the 1B model
        for name, swiglu in (("qkv", False), ("uz", True)):
            found[f"read {name}, {width}"] = build(
                k._read, {"w_ptr": BF16} | stream | sizes, k.warps(width),
                UPDATE=True, SWIGLU=swiglu, ROWS=k.READ_ROWS, D=width, **seen,
            )  # fmt: skip
        parts = {"w_ptr": BF16, "acc_ptr": FP32, "top_ptr": FP32, "sum_ptr": FP32, "x_ptr": FP32}
        found[f"project, {width}"] = build(
            k._project, parts | sizes | {"heads": "i32"}, k.warps(width),
            D_HEAD=64, SPLITS=k.MAX_SPLITS, ROWS=k.READ_ROWS, D=width, OVERLAP=True,
        )  # fmt: skip
        found[f"down, {mlp}"] = build(
            k._down, {"w_ptr": BF16, "y_ptr": FP32, "x_ptr": FP32, "n": "i32", "width": "i32"}, k.warps(mlp // 4),
            ROWS=k.DOWN_ROWS, WIDTH=mlp, OVERLAP=True,
        )  # fmt: skip
    return found


if __name__ == "__main__":
    json.dump({"training": training, "models": models, "inference": inference}[sys.argv[1]](), sys.stdout, indent=1)
