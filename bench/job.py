"""The ranks of a benchmark that owns its whole job."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh

import gtpgraph as gg


def job_groups(device: str = "cpu", **axes: int) -> gg.ProcessGroups:
    """Process groups of a mesh over all ranks of this job, e.g. ``job_groups(dp=2, gtp=2)``.

    Args:
        device: the mesh's device type; "cuda" for a job whose groups are NCCL's.
        axes: axis -> ranks along it, the outermost first; their product is the job's ranks.
    """
    mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    return gg.ProcessGroups.from_mesh(mesh)
