"""The kernels suite: every reduction beside its peers. Cases are data; ``harness`` measures them.

``ours`` calls the operator as a graph would; ``limit`` and
``limit:kernel`` are device copies of the same bytes (for the
GEMMs the plain bf16 ``mm``). Shapes of ``wgrad_gemm`` are tokens x in_features x out_features.
"""

from collections.abc import Callable
from typing import Any

import torch

from bench.harness import Case, Thunk, limits
from gtpgraph.kernels import gemm_table, ops, stats

SCALE = 0.125
GEMM_SHAPES = (
    (8192, 4096, 14336),
    (8192, 4096, 4096),
    (4096, 768, 3072),
    (512, 768, 3072),
    (4096, 1024, 4096),
    (2048, 2048, 8192),
)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def beta(value: float) -> torch.Tensor:
    return torch.full((1,), value, device="cuda")


def gate(
    name: str, run: Callable[[torch.Tensor], Any], start: torch.Tensor, value: torch.Tensor
) -> None:
    """``run(main)`` must give ``start + SCALE * value`` within twice torch's error + a rounding."""
    main = start.clone()
    run(main)
    exact = start.double() + SCALE * value.double()
    best = start + SCALE * value.float()
    norm = exact.norm()
    error, reference = ((t.double() - exact).norm() / norm for t in (main, best))
    limit = 2 * float(reference) + torch.finfo(main.dtype).eps / 2
    if not float(error) <= limit:  # NaN must not pass
        raise AssertionError(f"{name}: error {float(error):.2e}, expected <= {limit:.2e}")


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


def gemm_impls(
    flat: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, configs: bool
) -> dict[str, Thunk]:
    from gtpgraph.kernels import wgrad_gemm as kernel

    main = flat.view(dy.shape[1], x.shape[1])
    one, zero, dtype = beta(1.0), beta(0.0), torch.float32
    dtype_out = torch.ops.aten.addmm.dtype_out
    impls: dict[str, Thunk] = {
        "ours": lambda: ops.wgrad_gemm(flat, dy, x, one, 0, 0, SCALE, False),
        "ours:first-adds": lambda: ops.wgrad_gemm(flat, dy, x, one, 0, 0, SCALE, True),
        "ours:first-stores": lambda: ops.wgrad_gemm(flat, dy, x, zero, 0, 0, SCALE, True),
        "mm+add_": lambda: main.add_(torch.mm(dy.t(), x), alpha=SCALE),
        "addmm": lambda: dtype_out(main, dy.t(), x, dtype, beta=1.0, alpha=SCALE, out=main),
        "limit": lambda: torch.mm(dy.t(), x),
    }
    if configs:
        for name, config in gemm_table.CONFIGS.items():
            for first in (False, True):
                problem = kernel.Problem(flat, dy, x, one, 0, 0, SCALE, first)
                impls[f"triton-{name}{':first' if first else ''}"] = (
                    lambda problem=problem, config=config: kernel.run_triton(problem, config)
                )
    return impls


def wgrad_gemm(tokens: int, columns: int, rows: int, configs: bool) -> Case:
    def make(seed: int) -> dict[str, Thunk]:
        torch.manual_seed(seed)
        dy = randn(tokens, rows, dtype=torch.bfloat16)
        x = randn(tokens, columns, dtype=torch.bfloat16)
        return gemm_impls(randn(rows * columns), dy, x, configs)

    def check() -> None:
        from gtpgraph.kernels import wgrad_gemm as kernel

        dy = randn(tokens, rows, dtype=torch.bfloat16)
        x = randn(tokens, columns, dtype=torch.bfloat16)
        value = torch.mm(dy.double().t(), x.double()).flatten()
        ways: dict[str, Callable[[torch.Tensor], Any]] = {
            "ours": lambda m: ops.wgrad_gemm(m, dy, x, beta(1.0), 0, 0, SCALE, False),
            "first": lambda m: ops.wgrad_gemm(m, dy, x, beta(1.0), 0, 0, SCALE, True),
        }
        for name, config in gemm_table.CONFIGS.items() if configs else ():
            ways[name] = lambda m, config=config: kernel.run_triton(
                kernel.Problem(m, dy, x, beta(1.0), 0, 0, SCALE, True), config
            )
        start = randn(rows * columns)
        plain = start.clone().view(rows, columns)
        torch.ops.aten.addmm.dtype_out(
            plain, dy.t(), x, torch.float32, beta=1.0, alpha=SCALE, out=plain
        )
        exact = start.double() + SCALE * value
        limit = 2 * float((plain.flatten().double() - exact).norm() / exact.norm()) + 2**-24
        for name, run in ways.items():
            main = start.clone()
            run(main)
            error = float((main.double() - exact).norm() / exact.norm())
            if not error <= limit:
                raise AssertionError(f"wgrad_gemm {name}: {error:.2e}, expected <= {limit:.2e}")

    name = f"wgrad_gemm:{tokens}x{columns}x{rows}"
    num_bytes = 2 * tokens * (rows + columns) + 8 * rows * columns
    flops = 2.0 * tokens * rows * columns
    return Case(
        name, num_bytes, make, check, flops, conditions={"operands": "bf16", "main": "fp32"}
    )


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
    ]
    gemms: list[Callable[[], Case]] = [
        lambda shape=shape: wgrad_gemm(*shape, configs=configs) for shape in GEMM_SHAPES
    ]
    return memory + gemms
