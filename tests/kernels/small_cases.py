"""Every kernel once or twice at small odd sizes, for compute-sanitizer (not collected by pytest):

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 3 \
        python tests/kernels/small_cases.py

and the same with ``--tool racecheck``. Without the caching allocator every tensor is an allocation
of its own, so that an access one element outside is seen.
"""

import torch

from gtpgraph.kernels import gemm_table, ops, reference, stats
from gtpgraph.kernels import symmetric as symmetric_kernel
from gtpgraph.kernels import wgrad_gemm as gemm_kernel

DEVICE = "cuda"


def expect(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.allclose(got.float(), expected.float(), rtol=1e-5, atol=1e-4, equal_nan=True):
        raise AssertionError(f"{name}: wrong values")
    print(f"{name}: right", flush=True)


def reductions(beta: torch.Tensor) -> None:
    for numel in (1, 37, 2048, 4099):
        wgrad = torch.randn(numel, device=DEVICE).bfloat16()
        flat, partials = torch.zeros(numel, device=DEVICE), stats.new_partials(numel, DEVICE)
        ops.accumulate(flat, wgrad, beta, 0, 0, 0.5, True)
        ops.accumulate_stats(flat, wgrad, beta, 0, 0, 0.5, False, partials)
        expect(f"accumulate {numel}", flat, wgrad.float())
        recv = torch.randn(9, numel, device=DEVICE).bfloat16()
        ops.shard_reduce(flat, recv, beta, 0, 0, 0.5, True, numel - 1, partials)
        total = reference.sum_rows(list(recv)) * 0.5
        total[-1] = 0
        expect(f"shard_reduce {numel}", flat, total)
    wgrad = torch.randn(67, 45, device=DEVICE).bfloat16().t()
    flat = torch.zeros(67 * 45, device=DEVICE)
    ops.accumulate(flat, wgrad, beta, 0, 0, 1.0, True)
    expect("accumulate strided", flat, wgrad.reshape(-1))


def lists(beta: torch.Tensor) -> None:
    tensors = [torch.randn(n, device=DEVICE).bfloat16() for n in (37, 8, 5000)]
    offsets, flat = [0, 40, 48], torch.zeros(5048, device=DEVICE)
    ops.accumulate_many(flat, tensors, beta, [0] * 3, offsets, 1.0, [True, False, True])
    packed = torch.empty(5048, device=DEVICE)
    ops.pack(packed, tensors, offsets)
    expect("accumulate_many and pack", flat, packed)
    outs = [torch.empty(t.numel(), device=DEVICE) for t in tensors]
    ops.unpack(outs, flat, offsets)
    expect("unpack", torch.cat(outs), torch.cat(tensors))


def gemm(beta: torch.Tensor) -> None:
    for tokens, rows, columns in ((40, 72, 136), (33, 37, 65)):
        dy = torch.randn(tokens, rows, device=DEVICE).bfloat16()
        x = torch.randn(tokens, columns, device=DEVICE).bfloat16()
        expected = (dy.double().t() @ x.double()).flatten()
        for name, config in {"cublas": None, **gemm_table.CONFIGS}.items():
            flat = torch.full((rows * columns,), float("nan"), device=DEVICE)
            problem = gemm_kernel.Problem(flat, dy, x, beta, 0, 0, 1.0, True)
            gemm_kernel.wgrad_gemm(problem, config)
            expect(f"wgrad_gemm {name} {tokens}x{columns}x{rows}", flat, expected)


def scatter(beta: torch.Tensor) -> None:
    values = torch.randn(41, 37, device=DEVICE).bfloat16()
    indices = torch.randint(9, (41,), device=DEVICE)
    flat = torch.full((9 * 37,), float("nan"), device=DEVICE)
    ops.scatter_accumulate(flat, values, indices, beta, 0, 0, 1.0, True, 9)
    dense = torch.zeros(9, 37, device=DEVICE).index_add_(0, indices, values.float())
    expect("scatter_accumulate", flat, dense.flatten())


def symmetric(beta: torch.Tensor) -> None:
    numel = 1100
    buffers = [torch.randn(3 * numel, device=DEVICE).bfloat16() for _ in range(3)]
    table = torch.tensor([b.data_ptr() for b in buffers], device=DEVICE)
    flat, out = torch.empty(numel, device=DEVICE), torch.empty(9 * numel, device=DEVICE)
    symmetric_kernel.launch_reduce_scatter(
        flat, table, torch.bfloat16, 2, numel, beta, 0, 0, 1.0, True
    )
    expect("reduce-scatter", flat, reference.sum_rows([b[2 * numel :] for b in buffers]))
    symmetric_kernel.launch_all_gather(out, table, torch.bfloat16, 1, 3 * numel)
    expect("all-gather", out, torch.cat(buffers))


def main() -> None:
    torch.manual_seed(0)
    beta = torch.zeros(1, device=DEVICE)
    for part in (reductions, lists, gemm, scatter, symmetric):
        part(beta)
    torch.cuda.synchronize()
    print("all right", flush=True)


if __name__ == "__main__":
    main()
