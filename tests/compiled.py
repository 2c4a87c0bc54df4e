"""Compiles kernels for a GPU that need not be there, and says what became of them: `python -m tests.compiled`.

A process of its own, because tests have Triton interpret kernels. Prints JSON: stack and registers of a thread, bytes
of shared memory, and the instructions that load from memory and that multiply on tensor cores, by their kind.
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


def build(
    kernel, types: dict[str, str], num_warps: int, num_stages: int = 3, maxnreg: int | None = None, **constants
) -> dict:
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
    options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
    compiled = triton.compile(source, target=HOPPER, options=options)
    asm = compiled.asm
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name.lower(): int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", usage)}
    loads = Counter(re.findall(r"ld\.global\S*?\.((?:v\d\.)?b\d+)", asm["ptx"]))
    ahead = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (0x\w+)", asm["ptx"])
    found["stores"] = Counter(re.findall(r"st\.global\S*?\.((?:v\d\.)?b\d+)", asm["ptx"]))
    found["shared"] = compiled.metadata.shared
    found["products"] = Counter(re.findall(r"wgmma\.mma_async|mma\.sync", asm["ptx"]))
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
        **in_8_bits(float8, packed, normed),
        "scaled rows": build(k._scale_rows, rows | {"y_ptr": BF16}, 4, **unit),
        **{
            f"scaled rows, {kind[1:]}": build(
                k._scale_rows, rows | {"w_ptr": kind, "y_ptr": BF16}, 4, BLOCK=k.scale_rows_block(1)
            )
            for kind in (FP8, "*i8")
        },
        "scaled rows backward": build(k._scale_rows_backward, rows | {"g_ptr": BF16, "dscale_ptr": FP32}, 4, **unit),
    }


def in_8_bits(k, packed, normed) -> dict[str, dict]:
    """Kernels that write e4m3 and its transpose, at the shapes of the 0.5B model."""
    both = {"scale_ptr": FP32, "y_ptr": FP8, "t_ptr": FP8}
    rows = both | {"n_rows": "i32"}
    pair = rows | {"uz_ptr": BF16, "width": "i32"}
    heads = {name: kind for name, kind in packed.items() if name != "heads"} | both
    heads |= dict.fromkeys(("dq_ptr", "dk_ptr", "dv_ptr"), BF16) | {"q_terms_ptr": FP32, "k_terms_ptr": FP32}
    large, gate = {"LARGEST": 448.0}, {"FACTOR": 1.5}
    return {
        "swiglu, e4m3": build(k._swiglu_e4m3, pair, **gate, **large, **k.SWIGLU),
        "swiglu backward, e4m3": build(
            k._swiglu_backward_e4m3, pair | {"dh_ptr": BF16}, **gate, **large, **k.SWIGLU_BACKWARD
        ),
        **{
            f"heads backward, e4m3, {d}": build(
                k._heads_backward_e4m3,
                heads,
                **normed | {"K_GAIN": False},
                **large,
                heads=1024 // d,
                **k._heads_tile(d),
            )
            for d in (64, 128)
        },
    }


def inference() -> dict[str, dict]:
    from angpt.fast import decode_kernels as k

    vectors = dict.fromkeys(("h_ptr", "x_ptr", "keep_ptr", "add_ptr", "out_ptr", "y_ptr", "scale_ptr"), FP32)
    sizes = {"n": "i32", "d": "i32"}
    seen = {"LERP": True, "OUTPUT_NORM": True, "UPDATE_NORM": False, "INPUT_NORM": False, "EPS": 1e-20, "OVERLAP": True}
    found = {}
    for width, mlp, kind in ((1024, 4096, BF16), (2048, 8192, BF16), (1024, 4096, "*fp8e4nv"), (1024, 4096, "*i8")):
        weight, scaled = {"w_ptr": kind}, {"SCALED": kind != BF16}
        of = "" if kind == BF16 else f", {kind[1:]}"
        for name, swiglu in (("qkv", False), ("uz", True)):
            found[f"read {name}, {width}{of}"] = build(
                k._read, weight | vectors | sizes, k.warps(width),
                UPDATE=True, SWIGLU=swiglu, ROWS=k.READ_ROWS, D=width, **seen, **scaled,
            )  # fmt: skip
        parts = dict.fromkeys(("scale_ptr", "acc_ptr", "top_ptr", "sum_ptr", "x_ptr"), FP32)
        found[f"project, {width}{of}"] = build(
            k._project, weight | parts | sizes | {"heads": "i32"}, k.warps(width),
            HEADS=width // 64, D_HEAD=64, SPLITS=k.MAX_SPLITS, ROWS=k.READ_ROWS, OVERLAP=True, **scaled,
        )  # fmt: skip
        pair = dict.fromkeys(("scale_ptr", "y_ptr", "x_ptr"), FP32) | dict.fromkeys(("n", "width", "batch"), "i32")
        found[f"down, {mlp}{of}"] = build(
            k._down, weight | pair, k.warps(mlp // 4), ROWS=k.DOWN_ROWS, WIDTH=mlp, OVERLAP=True, **scaled
        )
    pair |= {"w_ptr": BF16}
    found["down, head"] = build(k._down, pair, 4, SCALED=False, ROWS=k.READ_ROWS, WIDTH=1024, OVERLAP=True)
    return found | many_rows() | between_products()


def many_rows() -> dict[str, dict]:
    """The products of a decode step of the 0.5B model, by the rows of the batch."""
    from angpt.fast import rows_kernels as k
    from angpt.fast import tuning

    fixed = dict.fromkeys(("scale_ptr", "y_ptr"), FP32) | {"x_ptr": BF16, "n": "i32", "k": "i32", "batch": "i32"}
    found = {}
    for batch, kind in ((16, BF16), (32, BF16), (64, BF16), (128, BF16), (16, FP8), (32, FP8), (128, FP8), (32, "*i8")):
        line = k.LINE_BYTES // (2 if kind == BF16 else 1)
        for name, swiglu, depth in (("qkv", False, 512), ("p", False, 256), ("uz", True, 1024)):
            rows, cols, warps, stages = (tuning.DECODE_SWIGLU_TILES if swiglu else tuning.DECODE_TILES)[batch]
            held = k.held(batch, depth, cols, swiglu)
            found[f"product {name}, {batch} rows" + ("" if kind == BF16 else f", {kind[1:]}")] = build(
                k._product, fixed | {"w_ptr": kind}, warps, stages,
                SCALED=kind != BF16, SHRINK=k.SHRINK, SWIGLU=swiglu, HELD=held, DEPTH=depth, LINE=line,
                LINES=depth // line, BATCH=batch, ROWS=rows, COLS=cols, OVERLAP=True,
            )  # fmt: skip
    return found


def between_products() -> dict[str, dict]:
    """Attention, residual updates and heads of the 0.5B model, as they lie between products."""
    from angpt.fast import attention_kernels as attention
    from angpt.fast import decode_kernels as few
    from angpt.fast import prompt_kernels as prompts
    from angpt.fast import rows_kernels as many
    from angpt.fast import tuning

    head = {"QK_NORM": True, "GAINS": 1, "EPS": 1e-20, "HALF": 16, "D_HEAD": 64}
    slots = {"NEVER": attention.NEVER, "OVERLAP": True}
    angles = dict.fromkeys(("cos_ptr", "sin_ptr", "gain_ptr"), FP32)
    cache = {"k_ptr": BF16, "v_ptr": BF16, "stride_row": "i32", "stride_head": "i32", "heads": "i32"}
    whole = angles | cache | {"qkv_ptr": FP32, "positions_ptr": I64, "capacity": "i32", "shown": "i32", "out_ptr": BF16}
    split = {name: kind for name, kind in whole.items() if name != "out_ptr"}
    split |= dict.fromkeys(("acc_ptr", "top_ptr", "sum_ptr"), FP32)
    update = dict.fromkeys(("h_ptr", "x_ptr", "keep_ptr", "add_ptr", "out_ptr"), FP32) | {"d": "i32", "stride": "i32"}
    rows, warps = update | {"y_ptr": BF16}, tuning.DECODE_ADVANCE_WARPS
    seen = {"LERP": True, "OUTPUT_NORM": True, "UPDATE_NORM": False, "INPUT_NORM": False, "EPS": 1e-20, "D": 1024}
    sums = {"acc_ptr": FP32, "top_ptr": FP32, "sum_ptr": FP32, "out_ptr": BF16, "d": "i32", "heads": "i32"}
    packed = angles | cache | {"qkv_ptr": BF16, "q_ptr": BF16, "length": "i32"}
    return {
        "attend, split": build(
            attention._attend, split, tuning.DECODE_ATTEND_WARPS, PARTS=1, PER_SPLIT=512, TILE=few.TILE, **head, **slots
        ),
        **{
            f"attend, {name}, {d}": build(
                attention._attend_whole, whole, PARTS=2, **head | {"D_HEAD": d}, **slots, **many.pipeline(shown, d)
            )
            for name, shown in (("short", tuning.DECODE_SHORT), ("long", 2 * tuning.DECODE_SHORT))
            for d in (64, 128, 256)
        },
        "combine": build(attention._combine, sums, 4, HEADS=16, D_HEAD=64, SPLITS=2, OVERLAP=True),
        "advance, rows": build(few._advance, rows, warps, UPDATE=True, PARTS=8, OVERLAP=True, **seen),
        "advance, prompts": build(
            few._advance, update | {"x_ptr": BF16, "y_ptr": BF16}, 4, UPDATE=True, PARTS=1, OVERLAP=False, **seen
        ),
        "advance, first": build(few._advance, update | {"y_ptr": BF16}, 4, UPDATE=False, PARTS=1, OVERLAP=True, **seen),
        "heads of prompts": build(prompts._prompt_heads, packed, 4, HEADS=16, **head),
    }


if __name__ == "__main__":
    json.dump({"training": training, "models": models, "inference": inference}[sys.argv[1]](), sys.stdout, indent=1)
