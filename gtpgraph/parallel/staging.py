"""Staging buffers in symmetric memory: what peers read, one for each group and stream.

In: the groups of a model and the largest weight (or bucket) that each exchanges. Out: byte buffers
that the operators of `gtpgraph.kernels.ops_staged` fill and exchange. The operators of one stream
may share a buffer, for each ends when all peers have read it; two streams have a buffer each.

Making them is a collective over each group, by host threads alone; it is done before any capture.
On a CPU there is no symmetric memory: the buffers are ordinary and an ordinary collective moves
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from gtpgraph.kernels.checks import WGRAD_DTYPES, names
from gtpgraph.parallel.sharding import gtp_weights

COLLECTIVES = ("functional", "symmetric")
_ALIGN = 256  # bytes


def padded_bytes(numel: int, *dtypes: torch.dtype) -> int:
    """Bytes that hold `numel` elements of the widest of `dtypes`."""
    return -(-numel * max(d.itemsize for d in dtypes) // _ALIGN) * _ALIGN


class Staging:
    """One staging buffer, uint8 [bytes], for each group name in `sizes` (bytes)."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None
        self._buffers: dict[str, Tensor] = {}
        for group, size in sizes.items():
            self._buffers[group] = self._make(size, group)

    def _make(self, size: int, group: str) -> Tensor:
        if self._device.type != "cuda":
            return torch.zeros(size, dtype=torch.uint8, device=self._device)
        from gtpgraph.kernels import symmetric

        buffer = symmetric.allocate(size, self._device)
        symmetric.attach(buffer, group)
        return buffer

    def __getitem__(self, group: str) -> Tensor:
        return self._buffers[group]

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups, in the order in which their buffers were made."""
        return tuple(self._buffers)

    def enter(self) -> None:
        """Before work that uses the buffers: the current stream waits for the one before it.

        Costs nothing where that is the same one. Inside a capture there is no other stream to wait
        for: a replay is launched behind this call.
        """
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream

    def close(self, *, stuck: bool = False) -> None:
        """Give the buffers back, once nothing on the device uses them. Idempotent.

        `stuck`: an exchange waits for a peer that never comes; the memory is left to the process.
        """
        if self._device.type == "cuda" and not stuck:
            from gtpgraph.kernels import symmetric

            torch.cuda.synchronize(self._device)
            for group, buffer in self._buffers.items():
                symmetric.detach(buffer, group)
        self._buffers = {}


def weight_staging(module: nn.Module, wire: torch.dtype) -> Staging:
    """Buffers for the gathers and reductions of every GTP weight in `module`, frozen ones too.

    A collective over each GTP group, in the order of its first weight.

    Raises:
        ValueError: weights of a dtype that the exchange does not take, or on several devices.
    """
    weights = [(p, info) for p, info in gtp_weights(module).items() if info.spec.group_name]
    bad = [
        f"{info.fqns[0]}: {names((p.dtype,))}" for p, info in weights if p.dtype not in WGRAD_DTYPES
    ]
    if bad:
        raise ValueError(
            f"collectives='symmetric': expected GTP weights of {names(WGRAD_DTYPES)}, got "
            f"{', '.join(bad[:6])}. Convert the model, or use collectives='functional'."
        )
    sizes: dict[str, int] = {}
    for param, info in weights:
        group = info.spec.group_name
        whole = padded_bytes(param.numel() * info.spec.gtp_size, wire)
        sizes[group] = max(sizes.get(group, 0), whole, padded_bytes(param.numel(), param.dtype))
    return Staging(sizes, one_device(p for p, _ in weights))


def one_device(tensors: Iterable[Tensor]) -> torch.device:
    """The device of all `tensors` (CPU for none).

    Raises:
        ValueError: there are several.
    """
    devices = list(dict.fromkeys(t.device for t in tensors))
    if len(devices) > 1:
        raise ValueError(
            f"collectives='symmetric': expected a model on one device, got {devices}. Move it to "
            "one before shard(), or use collectives='functional'."
        )
    return devices[0] if devices else torch.device("cpu")
