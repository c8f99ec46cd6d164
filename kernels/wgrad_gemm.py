"""wgrad_gemm: ``main = b * main + scale * dY^T X`` in fp32, never writing the low-precision wgrad.

Two ways, chosen per shape by measurement (``gemm_table``):

``addmm``   cuBLAS accumulates into main in place (``aten.addmm.dtype_out``). Its beta is a host
            number, so a first contribution, whose factor lives on the device, is preceded by
            ``prepare``: main is zeroed or scaled, and left alone at once when the factor is 1.
``triton``  a persistent kernel whose epilogue applies b (read on the device) and scale. Tiles come
            through TMA descriptors where rows are 16-byte multiples, through pointers elsewhere.

Bytes that must move: dY and X read once, main read (not when b == 0) and written once; operations
2 * T * M * N.

Legend: T tokens, M = out_features, N = in_features; dY [T, M], X [T, N], main [M, N], row-major.
"""

# Triton's language has no types:
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gtpgraph.kernels.common import cdiv, factor, on_device, update
from gtpgraph.kernels.gemm_table import Config
from gtpgraph.kernels.launch import launch

PREPARE_BLOCK, PREPARE_WARPS, PREPARE_PROGRAMS = 4096, 8, 528


@triton.jit
def load_tiles(
    p_dy,
    p_x,
    t,
    o_m,
    o_n,
    T,
    M,
    N,
    TMA: tl.constexpr,
    BT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    if TMA:  # p_dy, p_x are descriptors; outside the tensor they read 0
        dy = p_dy.load([t, o_m])
        x = p_x.load([t, o_n])
    else:
        r_t = t + tl.arange(0, BT)
        r_m = o_m + tl.arange(0, BM)
        r_n = o_n + tl.arange(0, BN)
        m_t = (r_t < T)[:, None]
        row = r_t[:, None].to(tl.int64)
        dy = tl.load(p_dy + row * M + r_m[None, :], mask=m_t & (r_m < M)[None, :], other=0.0)
        x = tl.load(p_x + row * N + r_n[None, :], mask=m_t & (r_n < N)[None, :], other=0.0)
    return dy, x  # [BT, BM], [BT, BN]


@triton.jit
def write_tile(p_main, acc, o_m, o_n, M, N, b, scale, BM: tl.constexpr, BN: tl.constexpr):
    r_m = o_m + tl.arange(0, BM)
    r_n = o_n + tl.arange(0, BN)
    m = (r_m < M)[:, None] & (r_n < N)[None, :]
    update(p_main + (r_m[:, None].to(tl.int64) * N + r_n[None, :]), m, b, acc, scale)


@triton.jit(do_not_specialize=["index"])
def wgrad_gemm_kernel(
    p_dy,
    p_x,
    p_flat,
    p_beta,
    index,
    offset,
    scale,
    T,
    M,
    N,
    FIRST: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    FLATTEN: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    b = factor(p_beta, index, FIRST)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        # GROUP rows of tiles at a time, so that the tiles in flight share operands in L2
        in_group = GROUP * tiles_n
        first_m = tile // in_group * GROUP
        rows = tl.minimum(tiles_m - first_m, GROUP)
        o_m = (first_m + tile % in_group % rows) * BM
        o_n = (tile % in_group // rows) * BN
        acc = tl.zeros([BM, BN], tl.float32)
        for t in range(0, T, BT):
            dy, x = load_tiles(p_dy, p_x, t, o_m, o_n, T, M, N, TMA, BT, BM, BN)
            acc = tl.dot(tl.trans(dy), x, acc, input_precision=PRECISION)
        p_main = p_flat + offset
        if SPLIT:  # halves, so that main's values don't need as many registers as acc
            lo, hi = tl.split(tl.permute(tl.reshape(acc, [BM, 2, BN // 2]), [0, 2, 1]))
            write_tile(p_main, lo, o_m, o_n, M, N, b, scale, BM, BN // 2)
            write_tile(p_main, hi, o_m, o_n + BN // 2, M, N, b, scale, BM, BN // 2)
        else:
            write_tile(p_main, acc, o_m, o_n, M, N, b, scale, BM, BN)


@triton.jit(do_not_specialize=["index"])
def prepare_kernel(p_flat, p_beta, index, offset, N, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    """``main = b * main`` (0 stores); returns at once where b is 1."""
    b = tl.load(p_beta + index)
    if b != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, N, PROGRAMS * BLOCK):
            o = start + tl.arange(0, BLOCK)
            update(p_flat + offset + o, o < N, b, tl.zeros([BLOCK], tl.float32), 0.0)


@dataclass(frozen=True)
class Problem:
    """One call: dy [T, M], x [T, N], and main = flat[offset : offset + M * N]."""

    flat: torch.Tensor
    dy: torch.Tensor
    x: torch.Tensor
    beta: torch.Tensor
    index: int
    offset: int
    scale: float
    first: bool


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side at one a multiprocessor."""
    if device.type != "cuda":  # interpreter
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def takes_tma(dy: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether both operands can be read through TMA descriptors (16-byte rows and addresses)."""
    return all(
        t.data_ptr() % 16 == 0 and t.shape[1] * t.element_size() % 16 == 0 and t.shape[0] > 0
        for t in (dy, x)
    )


def run_triton(p: Problem, config: Config) -> None:
    """Launch the Triton kernel with ``config``."""
    (num_t, num_m), num_n = p.dy.shape, p.x.shape[1]
    programs = config.per_sm * multiprocessors(p.flat.device)
    programs = min(programs, cdiv(num_m, config.bm) * cdiv(num_n, config.bn))
    tma = takes_tma(p.dy, p.x)
    dy: torch.Tensor | TensorDescriptor = p.dy
    x: torch.Tensor | TensorDescriptor = p.x
    if tma:
        dy = TensorDescriptor.from_tensor(p.dy, [config.bt, config.bm])
        x = TensorDescriptor.from_tensor(p.x, [config.bt, config.bn])
    key = ("wgrad_gemm", p.flat.device, p.flat.dtype, p.dy.dtype, p.offset, num_t, num_m, num_n,
           p.first, tma, config)  # fmt: skip
    launch(
        wgrad_gemm_kernel, key, (programs, 1, 1),
        (dy, x, p.flat, p.beta, p.index, p.offset, p.scale, num_t, num_m, num_n),
        {"FIRST": p.first, "TMA": tma, "PRECISION": "ieee", "BT": config.bt, "BM": config.bm,
         "BN": config.bn, "GROUP": config.group, "SPLIT": config.split, "FLATTEN": config.flatten,
         "PROGRAMS": programs},
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


def run_addmm(p: Problem) -> None:
    """cuBLAS in place; a first contribution is prepared by one kernel (module docstring)."""
    num_m, num_n = p.dy.shape[1], p.x.shape[1]
    numel = num_m * num_n
    main = p.flat[p.offset : p.offset + numel].view(num_m, num_n)
    if p.first:
        programs = min(PREPARE_PROGRAMS, cdiv(numel, PREPARE_BLOCK))
        prepare_kernel[(programs,)](
            p.flat, p.beta, p.index, p.offset, numel,
            BLOCK=PREPARE_BLOCK, PROGRAMS=programs, num_warps=PREPARE_WARPS,
        )  # fmt: skip
    if p.dy.dtype == torch.float32:
        torch.addmm(main, p.dy.t(), p.x, alpha=p.scale, out=main)
    else:
        torch.ops.aten.addmm.dtype_out(
            main, p.dy.t(), p.x, torch.float32, beta=1.0, alpha=p.scale, out=main
        )


def wgrad_gemm(p: Problem, choice: Config | None) -> torch.Tensor:
    """Run by ``choice`` (None: cuBLAS). Returns the token, uint8 [1], which nothing fills: writing
    it would cost a launch of its own beside cuBLAS."""
    with on_device(p.flat):
        if p.dy.shape[1] and p.x.shape[1]:
            if choice is None:
                run_addmm(p)
            else:
                run_triton(p, choice)
    return torch.empty(1, dtype=torch.uint8, device=p.flat.device)
