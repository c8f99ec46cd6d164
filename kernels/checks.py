"""Argument checks shared by the operators: each returns nothing, or raises naming every blocker."""

import torch

MAIN_DTYPES = (torch.float32, torch.bfloat16)
WGRAD_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """``float32 or bfloat16``: dtypes as an error message spells them."""
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def fail(op: str, problems: list[str]) -> None:
    """Raise one ValueError for all ``problems`` of a call of ``op``; none: return."""
    if problems:
        raise ValueError(f"gtpgraph::{op}: " + "; ".join(problems))


def fits(
    flat: torch.Tensor, value: torch.Tensor, beta: torch.Tensor, index: int, offset: int, numel: int
) -> bool:
    """Whether the checks below find nothing, in a fraction of their time: they run for every
    contribution of an uncaptured step."""
    return (
        flat.dim() == 1
        and flat.is_contiguous()
        and flat.dtype in MAIN_DTYPES
        and beta.dim() == 1
        and beta.dtype == torch.float32
        and beta.device == flat.device == value.device
        and value.dtype in WGRAD_DTYPES
        and 0 <= index < beta.numel()
        and 0 <= offset <= flat.numel() - numel
    )


def flat_problems(flat: torch.Tensor, beta: torch.Tensor) -> list[str]:
    """What is wrong with a bucket buffer and its per-weight factors, sizes aside."""
    problems = []
    if flat.dim() != 1 or not flat.is_contiguous():
        problems.append(
            f"flat: expected a contiguous 1-D bucket buffer, got shape {tuple(flat.shape)} with "
            f"strides {flat.stride()}; pass the bucket's flat buffer, not a view of a weight"
        )
    if flat.dtype not in MAIN_DTYPES:
        problems.append(f"flat: expected {names(MAIN_DTYPES)}, got {names((flat.dtype,))}")
    if beta.dim() != 1 or beta.dtype != torch.float32 or beta.device != flat.device:
        problems.append(
            f"beta: expected a 1-D float32 tensor on {flat.device}, got {names((beta.dtype,))} of "
            f"shape {tuple(beta.shape)} on {beta.device}"
        )
    return problems


def range_problems(flat: torch.Tensor, offset: int, numel: int) -> list[str]:
    """Whether ``flat[offset : offset + numel]`` lies in the buffer."""
    if offset < 0 or offset + numel > flat.numel():
        return [
            f"offset: [{offset}, {offset + numel}) lies outside the buffer of {flat.numel()} "
            "elements; offsets count elements of flat"
        ]
    return []


def index_problems(beta: torch.Tensor, index: int) -> list[str]:
    """Whether ``beta[index]`` exists."""
    if not 0 <= index < beta.numel():
        return [f"index: expected 0 <= index < {beta.numel()} (one beta a weight), got {index}"]
    return []


def wgrad_problems(flat: torch.Tensor, wgrad: torch.Tensor, name: str = "wgrad") -> list[str]:
    """Dtype and device of a contribution."""
    problems = []
    if wgrad.dtype not in WGRAD_DTYPES:
        problems.append(f"{name}: expected {names(WGRAD_DTYPES)}, got {names((wgrad.dtype,))}")
    if wgrad.device != flat.device:
        problems.append(f"{name}: on {wgrad.device}, but flat is on {flat.device}")
    return problems
