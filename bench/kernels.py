"""The kernels suite: every reduction beside its peers. Cases are data; ``harness`` measures them.

``ours`` calls the operator as a graph would; ``limit`` and ``limit:kernel`` are device copies of
the same bytes (for the GEMMs, in ``gemm``, the plain bf16 ``mm``).
"""

from collections.abc import Callable

import torch

from bench import gemm, scatter
from bench.harness import Case, Thunk, limits
from bench.inputs import SCALE, beta, gate, randn
from gtpgraph.kernels import ops, stats


def accumulate(numel: int = 1 << 27) -> Case:
    @torch.compile
    def inductor(main: torch.Tensor, wgrad: torch.Tensor) -> None:
        main.add_(wgrad, alpha=SCALE)

    one = beta(1.0)

    def make(seed: int) -> dict[str, Thunk]:
        torch.manual_seed(seed)
        main, wgrad = randn(numel), randn(numel, dtype=torch.bfloat16)
        partials = stats.new_partials(numel, "cuda")
        return {
            "ours": lambda: ops.accumulate(main, wgrad, one, 0, 0, SCALE, False),
            "ours:first": lambda: ops.accumulate(main, wgrad, one, 0, 0, SCALE, True),
            "ours:stats": lambda: ops.accumulate_stats(
                main, wgrad, one, 0, 0, SCALE, True, partials
            ),
            "add_": lambda: main.add_(wgrad, alpha=SCALE),
            "torch": lambda: main.add_(wgrad.float(), alpha=SCALE),
            "inductor": lambda: inductor(main, wgrad),
            **limits(10 * numel),
        }

    def check() -> None:
        main, wgrad = randn(numel), randn(numel, dtype=torch.bfloat16)
        gate("accumulate", lambda m: ops.accumulate(m, wgrad, one, 0, 0, SCALE, True), main, wgrad)

    return Case("accumulate", 10 * numel, make, check, conditions={"numel": numel, "wgrad": "bf16"})


def accumulate_store(numel: int = 1 << 27) -> Case:
    zero = beta(0.0)

    def make(seed: int) -> dict[str, Thunk]:
        torch.manual_seed(seed)
        main, wgrad = randn(numel), randn(numel, dtype=torch.bfloat16)
        return {
            "ours": lambda: ops.accumulate(main, wgrad, zero, 0, 0, SCALE, True),
            "torch": lambda: main.copy_(wgrad).mul_(SCALE),
            **limits(6 * numel),
        }

    def check() -> None:
        main, wgrad = torch.full((numel,), float("nan"), device="cuda"), randn(numel).bfloat16()
        ops.accumulate(main, wgrad, zero, 0, 0, SCALE, True)
        if not torch.equal(main, wgrad.float() * SCALE):
            raise AssertionError("accumulate_store: differs from wgrad * scale")

    return Case("accumulate_store", 6 * numel, make, check, conditions={"numel": numel, "b": 0})


def accumulate_strided(rows: int = 4096, columns: int = 14336) -> Case:
    @torch.compile
    def inductor(main: torch.Tensor, wgrad: torch.Tensor) -> None:
        main.add_(wgrad, alpha=SCALE)

    one, numel = beta(1.0), rows * columns

    def make(seed: int) -> dict[str, Thunk]:
        torch.manual_seed(seed)
        flat, wgrad = randn(numel), randn(rows, columns, dtype=torch.bfloat16).t()
        main = flat.view(columns, rows)
        return {
            "ours": lambda: ops.accumulate(flat, wgrad, one, 0, 0, SCALE, False),
            "add_": lambda: main.add_(wgrad, alpha=SCALE),
            "inductor": lambda: inductor(main, wgrad),
            **limits(10 * numel),
        }

    def check() -> None:
        flat, wgrad = randn(numel), randn(rows, columns, dtype=torch.bfloat16).t()
        value = wgrad.reshape(-1)
        gate("strided", lambda m: ops.accumulate(m, wgrad, one, 0, 0, SCALE, True), flat, value)

    shape = {"wgrad": f"bf16 [{rows}, {columns}] transposed"}
    return Case("accumulate_strided", 10 * numel, make, check, conditions=shape)


def many_layout() -> tuple[list[tuple[int, int]], list[int], int]:
    shapes = [(256, 37 if i % 2 else 1024) for i in range(200)]
    offsets, end = [], 0
    for rows, columns in shapes:
        offsets.append(end)
        end += rows * columns
    return shapes, offsets, end


def accumulate_many() -> Case:
    shapes, offsets, numel = many_layout()
    one, indices, first = beta(1.0), [0] * len(shapes), [True] * len(shapes)

    def make(seed: int) -> dict[str, Thunk]:
        torch.manual_seed(seed)
        flat = randn(numel)
        wgrads = [randn(*shape, dtype=torch.bfloat16) for shape in shapes]
        mains = [
            flat[o : o + w.numel()].view(w.shape) for o, w in zip(offsets, wgrads, strict=True)
        ]

        def loop() -> None:
            for main, wgrad in zip(mains, wgrads, strict=True):
                main.add_(wgrad, alpha=SCALE)

        return {
            "ours": lambda: ops.accumulate_many(flat, wgrads, one, indices, offsets, SCALE, first),
            "foreach": lambda: torch._foreach_add_(mains, wgrads, alpha=SCALE),
            "add_": loop,
            **limits(10 * numel),
        }

    def check() -> None:
        flat, wgrads = randn(numel), [randn(*shape, dtype=torch.bfloat16) for shape in shapes]
        gate(
            "many",
            lambda m: ops.accumulate_many(m, wgrads, one, indices, offsets, SCALE, first),
            flat,
            torch.cat([w.reshape(-1) for w in wgrads]),
        )

    work = {"weights": "100 x [256, 1024] + 100 x [256, 37], bf16"}
    plain = ("ours", "foreach", "add_")
    return Case("accumulate_many", 10 * numel, make, check, eager=plain, conditions=work)


def packing() -> Case:
    shapes, offsets, numel = many_layout()

    def make(seed: int) -> dict[str, Thunk]:
        torch.manual_seed(seed)
        flat = torch.empty(numel, device="cuda", dtype=torch.bfloat16)
        tensors = [randn(*shape) for shape in shapes]
        views = [
            flat[o : o + t.numel()].view(t.shape) for o, t in zip(offsets, tensors, strict=True)
        ]
        return {
            "ours": lambda: ops.pack(flat, tensors, offsets, SCALE),
            "ours:unpack": lambda: ops.unpack(tensors, flat, offsets, SCALE),
            "foreach": lambda: torch._foreach_copy_(views, tensors),
            **limits(6 * numel),
        }

    def check() -> None:
        tensors = [randn(*shape) for shape in shapes]
        flat = torch.full((numel,), float("nan"), device="cuda", dtype=torch.bfloat16)
        ops.pack(flat, tensors, offsets, SCALE)
        joined = torch.cat([t.reshape(-1) for t in tensors])
        if not torch.equal(flat, (joined * SCALE).bfloat16()):
            raise AssertionError("pack: differs from cat * scale")

    work = {"tensors": "100 x [256, 1024] + 100 x [256, 37], fp32 to bf16"}
    return Case("pack", 6 * numel, make, check, conditions=work)


def shard_reduce(ranks: int = 8, numel: int = 1 << 25) -> Case:
    @torch.compile
    def inductor(main: torch.Tensor, recv: torch.Tensor) -> None:
        main.add_(recv.sum(0, dtype=torch.float32), alpha=SCALE)

    one = beta(1.0)

    def make(seed: int) -> dict[str, Thunk]:
        torch.manual_seed(seed)
        main, recv = randn(numel), randn(ranks, numel, dtype=torch.bfloat16)
        partials = stats.new_partials(numel, "cuda")
        return {
            "ours": lambda: ops.shard_reduce(main, recv, one, 0, 0, SCALE, True),
            "ours:stats": lambda: ops.shard_reduce(
                main, recv, one, 0, 0, SCALE, True, None, partials
            ),
            "torch": lambda: main.add_(recv.sum(0, dtype=torch.float32), alpha=SCALE),
            "inductor": lambda: inductor(main, recv),
            **limits((2 * ranks + 8) * numel),
        }

    def check() -> None:
        main, recv = randn(numel), randn(ranks, numel, dtype=torch.bfloat16)
        value = recv.sum(0, dtype=torch.float64)
        gate(
            "shard_reduce", lambda m: ops.shard_reduce(m, recv, one, 0, 0, SCALE, True), main, value
        )

    work = {"ranks": ranks, "numel": numel, "wire": "bf16"}
    name = "shard_reduce" if ranks == 8 else f"shard_reduce:{ranks}"
    return Case(name, (2 * ranks + 8) * numel, make, check, conditions=work)


def cases(configs: bool) -> list[Callable[[], Case]]:
    """Makers, so that a case's buffers exist only while it is measured."""
    memory: list[Callable[[], Case]] = [
        accumulate,
        accumulate_store,
        accumulate_strided,
        accumulate_many,
        packing,
        shard_reduce,
        lambda: shard_reduce(64, 1 << 22),
        scatter.scatter_accumulate,
    ]
    gemms: list[Callable[[], Case]] = [
        lambda shape=shape: gemm.wgrad_gemm(*shape, configs=configs) for shape in gemm.SHAPES
    ]
    return memory + gemms
