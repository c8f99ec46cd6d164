"""What only a GPU shows: capture and replay, allocation, buffers above 2^31 elements, spills."""

from collections.abc import Callable

import pytest
import torch

from gtpgraph.kernels import ops, reference

pytestmark = pytest.mark.gpu
NAN = float("nan")


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_one_graph_serves_first_and_later_microbatches() -> None:
    wgrad = torch.randn(300, 40, device="cuda").bfloat16()
    small = [torch.randn(37, device="cuda").bfloat16(), torch.randn(64, device="cuda").bfloat16()]
    dy, x = (torch.randn(64, n, device="cuda").bfloat16() for n in (32, 48))
    rows, at = torch.randn(90, 8, device="cuda"), torch.randint(50, (90,), device="cuda")
    flat, beta = torch.empty(20000, device="cuda"), torch.zeros(4, device="cuda")

    def step() -> None:
        ops.scatter_accumulate(flat, rows, at, beta, 3, 14000, 0.5, True, 50)
        token = ops.accumulate(flat, wgrad, beta, 0, 0, 0.5, True)
        token = ops.accumulate(flat, wgrad.t(), beta, 0, 0, 0.5, False, token)
        ops.accumulate_many(flat, small, beta, [1, 2], [12000, 12040], 0.5, [True, True])
        ops.wgrad_gemm(flat, dy, x, beta, 3, 12104, 0.5, True)

    graph = captured(step)
    flat.fill_(NAN)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for microbatch, b in enumerate((0.0, 1.0, 1.0)):
        beta.fill_(b)
        graph.replay()
        torch.cuda.synchronize()
        times = microbatch + 1
        both = wgrad.float().flatten() + wgrad.t().float().flatten()
        torch.testing.assert_close(flat[:12000], both * 0.5 * times, rtol=1e-6, atol=1e-5)
        assert torch.equal(flat[12000:12037], small[0].float() * 0.5 * times)
        assert torch.equal(flat[12040:12104], small[1].float() * 0.5 * times)
        product = (dy.double().t() @ x.double()).flatten() * 0.5 * times
        torch.testing.assert_close(flat[12104:13640].double(), product, rtol=1e-5, atol=1e-4)
        dense = torch.zeros(50, 8, device="cuda").index_put_((at,), rows, accumulate=True)
        torch.testing.assert_close(flat[14000:14400].view(50, 8), dense * 0.5 * times)
        for gap in (flat[12037:12040], flat[13640:14000], flat[14400:]):
            assert gap.isnan().all()
    del before


def test_a_replay_allocates_nothing_and_repeats_bit_for_bit() -> None:
    wgrads = [torch.randn(n, device="cuda").bfloat16() for n in (37, 8, 5000)]
    recv = torch.randn(8, 4000, device="cuda").bfloat16()
    flat, beta = torch.zeros(12000, device="cuda"), torch.zeros(1, device="cuda")

    def step() -> None:
        ops.accumulate_many(flat, wgrads, beta, [0] * 3, [0, 37, 45], 0.3, [True] * 3)
        ops.shard_reduce(flat, recv, beta, 0, 6000, 0.3, True)

    graph = captured(step)
    graph.replay()
    torch.cuda.synchronize()
    expected = flat.clone()
    key = "allocation.all.allocated"
    before = torch.cuda.memory_stats()[key]
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()[key] == before
    assert torch.equal(flat, expected)


def test_many_needs_one_run_before_capture() -> None:
    flat, beta = torch.zeros(91, device="cuda"), torch.zeros(1, device="cuda")
    wgrads = [torch.randn(91, device="cuda")]
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="Run the step once before"):
        with torch.cuda.graph(graph):
            ops.accumulate_many(flat, wgrads, beta, [0], [0], 1.0, [True])
    torch.cuda.synchronize()


def test_above_two_to_the_31_elements() -> None:
    numel, tail = 2**31 + 4096, 5000
    beta = torch.zeros(1, device="cuda")
    wgrad = torch.empty(numel, device="cuda", dtype=torch.bfloat16).normal_()
    flat = torch.empty(numel + tail, device="cuda", dtype=torch.bfloat16)
    ops.accumulate(flat, wgrad, beta, 0, 0, 1.0, True)
    assert torch.equal(flat[:numel], wgrad)
    small = wgrad[:tail].clone()
    ops.accumulate(flat, small, beta, 0, numel, 0.5, True)  # offset alone above 2^31
    assert torch.equal(flat[numel:], (small.float() * 0.5).bfloat16())
    ops.accumulate_many(flat, [small[:37].clone()], beta, [0], [numel + 3], 2.0, [True])
    assert torch.equal(flat[numel + 3 : numel + 40], (small[:37].float() * 2).bfloat16())
    out = torch.empty(100, device="cuda")
    ops.unpack([out], flat, [numel + 1000])
    assert torch.equal(out, flat[numel + 1000 : numel + 1100].float())
    flat[:numel].zero_()
    side = 46344  # side^2 > 2^31
    square = wgrad[: 46336 * 46336].view(46336, 46336)
    assert side * side > 2**31 > 0 and square.numel() < numel
    ops.accumulate(flat, square.t(), beta, 0, 0, 1.0, True)
    assert torch.equal(flat[: square.numel()].view(46336, 46336), square.t())


def test_shard_reduce_above_two_to_the_31_elements() -> None:
    ranks, numel = 3, 2**30 + 1000
    recv = torch.empty(ranks, numel, device="cuda", dtype=torch.bfloat16).normal_()
    flat = torch.empty(2 * numel + 8, device="cuda", dtype=torch.bfloat16)
    ops.shard_reduce(flat, recv, torch.zeros(1, device="cuda"), 0, numel + 8, 1.0, True)
    for begin in (0, numel - 3000):
        piece = slice(begin, begin + 3000)
        total = reference.sum_rows(list(recv[:, piece])).bfloat16()
        assert torch.equal(flat[numel + 8 :][piece], total)


def test_scatter_above_two_to_the_31_elements() -> None:
    rows, columns, offset = 2**15 + 4, 2**16, 5  # values and main: above 2^31 each
    values = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16).normal_()
    indices = torch.arange(rows, device="cuda").flip(0)
    indices[0] = 0  # twice, in the first and in the last of values
    flat = torch.full((offset + rows * columns,), NAN, device="cuda", dtype=torch.bfloat16)
    beta = torch.zeros(1, device="cuda")
    ops.scatter_accumulate(flat, values, indices, beta, 0, offset, 1.0, True, rows)
    main = flat[offset:].view(rows, columns)
    assert torch.equal(main[1:-1], values[1:-1].flip(0))
    assert torch.equal(main[0], (values[0].float() + values[-1].float()).bfloat16())
    assert not main[-1].any() and flat[:offset].isnan().all()


def test_gemm_into_a_buffer_above_two_to_the_31_elements() -> None:
    from gtpgraph.kernels import gemm_table
    from gtpgraph.kernels import wgrad_gemm as kernel

    rows, columns, tokens = 46400, 46400, 16
    dy = torch.randn(tokens, rows, device="cuda").bfloat16()
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    flat = torch.empty(rows * columns, device="cuda", dtype=torch.float32)
    beta = torch.zeros(1, device="cuda")
    for choice in (None, gemm_table.LARGE):
        flat.fill_(NAN)
        problem = kernel.Problem(flat, dy, x, beta, 0, 0, 1.0, True)
        kernel.wgrad_gemm(problem, choice)
        for begin in (0, rows - 50):
            exact = dy[:, begin : begin + 50].double().t() @ x.double()
            got = flat.view(rows, columns)[begin : begin + 50].double()
            torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-4)


def test_bf16_main_takes_the_triton_gemm() -> None:
    dy, x = (torch.randn(200, n, device="cuda").bfloat16() for n in (136, 264))
    flat = torch.randn(136 * 264, device="cuda").bfloat16()
    old = flat.double()
    ops.wgrad_gemm(flat, dy, x, torch.ones(1, device="cuda"), 0, 0, 0.5, True)
    exact = old + 0.5 * (dy.double().t() @ x.double()).flatten()
    error = (flat.double() - exact).norm() / exact.norm()
    assert float(error) < torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.parametrize("ranks", [2, 8, 31, 64])
def test_shard_reduce_spills_no_register(ranks: int) -> None:
    from gtpgraph.kernels import shard_reduce as kernel

    flat, beta = torch.zeros(4096, device="cuda"), torch.zeros(1, device="cuda")
    recv = torch.randn(ranks, 4096, device="cuda").bfloat16()
    token = torch.zeros(1, dtype=torch.uint8, device="cuda")
    compiled = kernel.shard_reduce_kernel[(4,)](
        flat, recv, beta, token, flat, 0, 0, 1.0, recv.stride(0), 4096, 4096,
        R=ranks, FIRST=True, STATS=False, BLOCK=kernel.BLOCK, num_warps=kernel.NUM_WARPS,
    )  # fmt: skip
    assert compiled.n_spills == 0 and compiled.n_regs <= 128


def test_launches_repeated_with_other_tensors_and_alignments() -> None:
    """A repeated launch skips Triton's binder; odd addresses and factors must still be honoured."""
    storage = torch.randn(3, 1001, device="cuda").bfloat16()
    beta = torch.tensor([0.0, 1.0, 0.5], device="cuda")
    for start, index, scale in ((0, 0, 1.0), (0, 1, 0.5), (1, 1, 0.5), (0, 2, 2.0), (3, 0, 3.0)):
        for row in storage:
            wgrad = row[start : start + 900]
            flat = torch.randn(1000, device="cuda")
            want, many = flat.clone(), flat.clone()
            ops.accumulate(flat, wgrad, beta, index, 64, scale, True)
            ops.accumulate_many(many, [wgrad], beta, [index], [64], scale, [True])
            reference.accumulate(want, wgrad, beta, index, 64, scale, True)
            torch.testing.assert_close(flat, want)
            torch.testing.assert_close(many, want)
    for tokens in (64, 64, 32):
        dy, x = (torch.randn(tokens, n, device="cuda").bfloat16() for n in (32, 48))
        flat = torch.full((2000,), NAN, device="cuda")
        for index in (0, 1):
            ops.wgrad_gemm(flat, dy, x, beta, index, 64, 0.5, True)
        product = (dy.double().t() @ x.double()).flatten()  # stored, then added: 2 * 0.5
        torch.testing.assert_close(flat[64:1600].double(), product, rtol=1e-5, atol=1e-4)
