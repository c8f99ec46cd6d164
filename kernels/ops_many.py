"""Many tensors in one launch: accumulate_many, pack, unpack (conventions in ``ops``)."""

from collections.abc import Sequence

import torch

from gtpgraph.kernels import checks, reference
from gtpgraph.kernels.library import define, fake_token, new_token

Tensor = torch.Tensor


def accumulate_many(
    flat: Tensor,
    wgrads: Sequence[Tensor],
    beta: Tensor,
    indices: Sequence[int],
    offsets: Sequence[int],
    scale: float,
    first: Sequence[bool],
    after: Tensor | None = None,
) -> Tensor:
    """``main_i = b_i * main_i + scale * wgrad_i`` for many weights of one bucket in one launch.

    Args:
        wgrads: contiguous tensors of one dtype, any shapes, empty ones allowed.
        indices, offsets, first: one entry a tensor, as for ``accumulate``. The ranges
            ``[offset_i, offset_i + numel_i)`` must not overlap (all are written at once): a second
            contribution of a weight belongs to a second call.

    Raises:
        RuntimeError: on CUDA, the first call with these shapes is under graph capture.
    """
    token: Tensor = torch.ops.gtpgraph.accumulate_many(
        flat, list(wgrads), beta, list(indices), list(offsets), scale, list(first), after
    )
    return token


def pack(
    flat: Tensor,
    tensors: Sequence[Tensor],
    offsets: Sequence[int],
    scale: float = 1.0,
    after: Tensor | None = None,
) -> Tensor:
    """Fill all of ``flat``: ``flat[offset_i : offset_i + numel_i] = scale * tensor_i``, gaps zero.

    Args:
        flat: 1-D contiguous, fp32, bf16 or fp16: the buffer that leaves.
        tensors: contiguous tensors of one dtype (fp32, bf16 or fp16).
        offsets: ascending; ``offset_i + numel_i <= offset_(i+1)``.
    """
    token: Tensor = torch.ops.gtpgraph.pack(flat, list(tensors), list(offsets), scale, after)
    return token


def unpack(
    tensors: Sequence[Tensor],
    flat: Tensor,
    offsets: Sequence[int],
    scale: float = 1.0,
    after: Tensor | None = None,
) -> Tensor:
    """``tensor_i = scale * flat[offset_i : offset_i + numel_i]``, cast: :func:`pack` reversed."""
    token: Tensor = torch.ops.gtpgraph.unpack(list(tensors), flat, list(offsets), scale, after)
    return token


# Layouts that have passed the checks of places and indices: a step's calls repeat a few of them,
# and with hundreds of weights these checks would cost the host more than the kernel costs the GPU.
_passed: set[tuple[object, ...]] = set()


def _uniform(flat: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are contiguous, of one supported dtype and on flat's device (quickly)."""
    if not tensors:
        return True
    dtype, device = tensors[0].dtype, flat.device
    return dtype in checks.WGRAD_DTYPES and all(
        t.dtype is dtype and t.device == device and t.is_contiguous() for t in tensors
    )


def _list_problems(
    flat: Tensor, tensors: Sequence[Tensor], columns: dict[str, Sequence[object]]
) -> list[str]:
    problems = [
        f"{name}: expected {len(tensors)} entries, one a tensor, got {len(column)}"
        for name, column in columns.items()
        if len(column) != len(tensors)
    ]
    if len({t.dtype for t in tensors}) > 1:
        found = sorted({str(t.dtype) for t in tensors})
        problems.append(f"tensors: expected one dtype, got {', '.join(found)}; call once a dtype")
    for i, tensor in enumerate(tensors):
        problems += checks.wgrad_problems(flat, tensor, f"tensor {i}")
        if not tensor.is_contiguous():
            problems.append(
                f"tensor {i}: expected contiguous, got shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}; use accumulate, which takes strides, or .contiguous()"
            )
    return problems


def _overlap_problems(flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> list[str]:
    problems = []
    end, previous = 0, -1
    spans = sorted(
        (offset, t.numel(), i)
        for i, (offset, t) in enumerate(zip(offsets, tensors, strict=False))
        if t.numel()
    )
    for offset, numel, i in spans:
        problems += checks.range_problems(flat, offset, numel)
        if previous >= 0 and offset < end:
            problems.append(
                f"offsets: tensors {previous} and {i} overlap at element {offset}; expected "
                "disjoint ranges, a second contribution in a second call"
            )
        end, previous = offset + numel, i
    return problems


def _check_many(
    flat: Tensor,
    wgrads: Sequence[Tensor],
    beta: Tensor,
    indices: Sequence[int],
    offsets: Sequence[int],
    first: Sequence[bool],
) -> None:
    problems = checks.flat_problems(flat, beta)
    numels = tuple(w.numel() for w in wgrads)
    sizes = (flat.numel(), beta.numel(), len(first))
    layout = ("accumulate_many", sizes, numels, tuple(indices), tuple(offsets))
    if not problems and layout in _passed and _uniform(flat, wgrads):
        return
    columns: dict[str, Sequence[object]] = {"indices": indices, "offsets": offsets, "first": first}
    problems += _list_problems(flat, wgrads, columns)
    problems += _overlap_problems(flat, wgrads, offsets)
    for index in indices:
        problems += checks.index_problems(beta, index)
    checks.fail("accumulate_many", problems)
    _passed.add(layout)


def _check_packing(
    op: str, flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]
) -> None:
    numels = tuple(t.numel() for t in tensors)
    layout = ("packing", flat.shape, flat.stride(), flat.dtype, numels, tuple(offsets))
    if layout in _passed and _uniform(flat, tensors):
        return
    problems = _list_problems(flat, tensors, {"offsets": offsets})
    problems += _overlap_problems(flat, tensors, offsets)
    if flat.dim() != 1 or not flat.is_contiguous() or flat.dtype not in checks.WGRAD_DTYPES:
        problems.append(
            f"flat: expected 1-D contiguous {checks.names(checks.WGRAD_DTYPES)}, got "
            f"{checks.names((flat.dtype,))} of shape {tuple(flat.shape)}"
        )
    if list(offsets) != sorted(offsets) or any(not 0 <= o <= flat.numel() for o in offsets):
        problems.append(f"offsets: expected ascending within flat, got {list(offsets)}")
    checks.fail(op, problems)
    _passed.add(layout)


def _many_cpu(
    flat: Tensor,
    wgrads: list[Tensor],
    beta: Tensor,
    indices: list[int],
    offsets: list[int],
    scale: float,
    first: list[bool],
    after: Tensor | None = None,
) -> Tensor:
    _check_many(flat, wgrads, beta, indices, offsets, first)
    reference.accumulate_many(flat, wgrads, beta, indices, offsets, scale, first)
    return new_token(flat)


def _many_cuda(
    flat: Tensor,
    wgrads: list[Tensor],
    beta: Tensor,
    indices: list[int],
    offsets: list[int],
    scale: float,
    first: list[bool],
    after: Tensor | None = None,
) -> Tensor:
    from gtpgraph.kernels import many

    _check_many(flat, wgrads, beta, indices, offsets, first)
    return many.accumulate_many(flat, wgrads, beta, indices, offsets, scale, first)


def _pack_cpu(
    flat: Tensor,
    tensors: list[Tensor],
    offsets: list[int],
    scale: float,
    after: Tensor | None = None,
) -> Tensor:
    _check_packing("pack", flat, tensors, offsets)
    reference.pack(flat, tensors, offsets, scale)
    return new_token(flat)


def _pack_cuda(
    flat: Tensor,
    tensors: list[Tensor],
    offsets: list[int],
    scale: float,
    after: Tensor | None = None,
) -> Tensor:
    from gtpgraph.kernels import many

    _check_packing("pack", flat, tensors, offsets)
    return many.pack(flat, tensors, offsets, scale)


def _unpack_cpu(
    tensors: list[Tensor],
    flat: Tensor,
    offsets: list[int],
    scale: float,
    after: Tensor | None = None,
) -> Tensor:
    _check_packing("unpack", flat, tensors, offsets)
    reference.unpack(tensors, flat, offsets, scale)
    return new_token(flat)


def _unpack_cuda(
    tensors: list[Tensor],
    flat: Tensor,
    offsets: list[int],
    scale: float,
    after: Tensor | None = None,
) -> Tensor:
    from gtpgraph.kernels import unpack as kernel

    _check_packing("unpack", flat, tensors, offsets)
    return kernel.unpack(tensors, flat, offsets, scale)


def _fake(first: Tensor | list[Tensor], second: Tensor | list[Tensor], *rest: object) -> Tensor:
    flat = second if isinstance(first, list) else first
    assert isinstance(flat, Tensor)
    return fake_token(flat)


define(
    "accumulate_many(Tensor(a!) flat, Tensor[] wgrads, Tensor beta, int[] indices, int[] offsets, "
    "float scale, bool[] first, Tensor? after=None) -> Tensor",
    cpu=_many_cpu,
    cuda=_many_cuda,
    fake=_fake,
    beside=True,
)
define(
    "pack(Tensor(a!) flat, Tensor[] tensors, int[] offsets, float scale, Tensor? after=None) "
    "-> Tensor",
    cpu=_pack_cpu,
    cuda=_pack_cuda,
    fake=_fake,
)
define(
    "unpack(Tensor(a!)[] tensors, Tensor flat, int[] offsets, float scale, Tensor? after=None) "
    "-> Tensor",
    cpu=_unpack_cpu,
    cuda=_unpack_cuda,
    fake=_fake,
)
