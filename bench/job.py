"""The ranks of a benchmark that owns its whole job."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh

import gtpgraph as gg


def job_groups(**axes: int) -> gg.ProcessGroups:
    """Process groups of a mesh over all ranks of this job, e.g. ``job_groups(dp=2, gtp=2)``."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    return gg.ProcessGroups.from_mesh(mesh)
