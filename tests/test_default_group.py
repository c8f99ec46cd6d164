"""No use of the default process group (WORLD) in the package, and proof that one is found."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode leaves the checker's folder out
from default_group_check import (
    ALLOWLIST,
    ROOT,
    check,
    complaints,
    package_sources,
    read_allowlist,
)

HEAD = (
    "import torch\nimport torch.distributed as dist\nfrom torch.distributed import ProcessGroup\n"
)


def found(source: str, *others: str) -> list[str]:
    """`name: why` of each finding in a planted module; others are modules beside it."""
    files = {"gtpgraph/planted.py": source}
    files |= {f"gtpgraph/other{i}.py": text for i, text in enumerate(others)}
    return [f"{f.name}: {f.why}" for f in check(files)]


def test_the_package_uses_no_default_group_outside_the_allowlist() -> None:
    sources = package_sources()
    assert "gtpgraph/parallel/mesh_groups.py" in sources  # it looked where the code is
    assert complaints(check(sources), ALLOWLIST.read_text()) == []


OFFENDERS = {
    "module alias": ("import torch.distributed as d\nd.all_reduce(t)", "leaves out group"),
    "function alias": (
        "from torch.distributed import all_reduce as ar\nar(t)",
        "leaves out group",
    ),
    "c10d": (
        "from torch.distributed.distributed_c10d import broadcast\nbroadcast(t, 0)",
        "leaves out group",
    ),
    "full name": ("import torch.distributed\ntorch.distributed.barrier()", "leaves out group"),
    "assigned alias": ("f = dist.all_reduce\nf(t)", "leaves out group"),
    "assigned module": ("d = torch.distributed\nd.barrier()", "leaves out group"),
    "one of two names": (
        "f = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor\nf(a, b)",
        "leaves out group",
    ),
    "import in a function": (
        "def f(t):\n    from torch import distributed as x\n    x.all_reduce(t)",
        "leaves out group",
    ),
    "positional before it": ("dist.reduce_scatter_tensor(a, b, dist.ReduceOp.SUM)", "leaves out"),
    "keywords unseen": ("dist.all_reduce(t, **options)", "leaves out group"),
    "arguments unseen": ("dist.all_reduce(*everything)", "cannot be seen in *arguments"),
    "None": ("dist.all_reduce(t, group=None)", "passes group=None"),
    "None by position": ("dist.all_reduce(t, dist.ReduceOp.SUM, None)", "passes group=None"),
    "world size": ("n = dist.get_world_size()", "leaves out group"),
    "rank": ("n = dist.get_rank()", "leaves out group"),
    "WORLD": ("g = dist.group.WORLD", "names the default group"),
    "WORLD of the member class": ("g = dist.GroupMember.WORLD", "names the default group"),
    "private default": (
        "from torch.distributed.distributed_c10d import _get_default_group as g\ng()",
        "names the default group",
    ),
    "new_group": ("g = dist.new_group([0, 1])", "creates process groups"),
    "enumeration": ("dist.new_subgroups_by_enumeration([[0]])", "creates process groups"),
    "mesh over everything": (
        "from torch.distributed.device_mesh import DeviceMesh as M\nM('cpu', torch.arange(n))",
        "creates process groups",
    ),
    "init_device_mesh": (
        "from torch.distributed import init_device_mesh\ninit_device_mesh('cpu', (n,))",
        "creates process groups",
    ),
    "dcp.save": (
        "import torch.distributed.checkpoint as dcp\ndcp.save(state, checkpoint_id='x')",
        "leaves out process_group",
    ),
    "fully_shard": (
        "from torch.distributed.fsdp import fully_shard\nfully_shard(model)",
        "leaves out mesh",
    ),
    "torch DDP": ("torch.nn.parallel.DistributedDataParallel(m)", "leaves out process_group"),
    "sampler": (
        "from torch.utils.data import DistributedSampler\nDistributedSampler(data)",
        "leaves out num_replicas",
    ),
    "P2POp": ("dist.P2POp(dist.isend, t, 1)", "leaves out group"),
    "partial": (
        "import functools\nf = functools.partial(dist.all_reduce, op=1)",
        "leaves out group",
    ),
    "value": ("functions = [dist.all_reduce]", "is passed on as a value"),
    "attribute": ("class C:\n    def f(self):\n        self.ar = dist.all_reduce", "as a value"),
    "star import": ("from torch.distributed import *", "imports unseen names"),
    "dynamic name": ("getattr(dist, name)(t)", "which function cannot be seen"),
    "literal getattr": ("getattr(dist, 'barrier')()", "leaves out group"),
    # Wrapper functions that forward a group which may be None.
    "wrapper default": (
        "def wrap(t, group=None):\n    dist.all_reduce(t, group=group)",
        "group=group may be None",
    ),
    "wrapper annotation": (
        "def wrap(t, group: ProcessGroup | None):\n    dist.all_reduce(t, group=group)",
        "group=group may be None",
    ),
    "wrapper without annotation": (
        "def wrap(t, group):\n    dist.all_reduce(t, group=group)",
        "group=group may be None",
    ),
    "lambda": ("f = lambda t, g: dist.all_reduce(t, group=g)", "group=g may be None"),
    "field": (
        "class C:\n    dp: ProcessGroup | None\ndef f(c: C):\n    dist.barrier(group=c.dp)",
        "group=c.dp may be None",
    ),
    "type alias": (
        "G = ProcessGroup | None\ndef f(g: G):\n    dist.barrier(group=g)",
        "group=g may be None",
    ),
    "returned": (
        "def pick() -> ProcessGroup | None: ...\ng = pick()\ndist.barrier(group=g)",
        "group=g may be None",
    ),
    "getattr": (
        "def f(o: object, n: str):\n    g = getattr(o, n)\n    dist.barrier(group=g)",
        "group=g may be None",
    ),
    "conditional": ("dist.barrier(group=g if x else None)", "may be None"),
    "guard of another": (
        "def f(g: ProcessGroup | None, h: ProcessGroup | None):\n"
        "    if h is not None:\n        dist.barrier(group=g)",
        "group=g may be None",
    ),
    "guard that does not decide": (
        "def f(g: ProcessGroup | None, x: bool):\n"
        "    if g is None and x:\n        return\n    dist.barrier(group=g)",
        "group=g may be None",
    ),
    "wrong branch": (
        "def f(g: ProcessGroup | None):\n"
        "    if g is not None:\n        pass\n    else:\n        dist.barrier(group=g)",
        "group=g may be None",
    ),
}


@pytest.mark.parametrize("name", OFFENDERS)
def test_an_offender_is_found(name: str) -> None:
    source, why = OFFENDERS[name]
    assert any(why in finding for finding in found(HEAD + source)), found(HEAD + source)


def test_an_offender_behind_another_module_of_ours_is_found() -> None:
    compat = "from torch.distributed import all_reduce as reduce_all\n"
    for statement in ("from gtpgraph.other0 import reduce_all", "from .other0 import reduce_all"):
        assert found(f"{statement}\nreduce_all(t)", compat) == [
            "torch.distributed.all_reduce: leaves out group"
        ]


LEGITIMATE = {
    "group given": "def f(t, g: ProcessGroup):\n    dist.all_reduce(t, group=g)",
    "query": "def f(g: ProcessGroup):\n    return dist.get_rank(g), dist.get_world_size(group=g)",
    "by position": "def f(t, g: ProcessGroup):\n    dist.broadcast(t, 0, g)",
    "early return": (
        "def f(t, g: ProcessGroup | None):\n"
        "    if g is None or t is None:\n        return\n    dist.all_reduce(t, group=g)"
    ),
    "inside the check": (
        "def f(t, g: ProcessGroup | None):\n    if g is not None:\n        dist.barrier(group=g)"
    ),
    "else of the check": (
        "def f(t, g: ProcessGroup | None):\n"
        "    n = 1 if g is None else dist.get_world_size(g)\n    return n"
    ),
    "assert": "def f(g: ProcessGroup | None):\n    assert g is not None\n    dist.barrier(group=g)",
    "isinstance": (
        "def f(o):\n    if isinstance(g := getattr(o, 'tp'), ProcessGroup):\n"
        "        dist.barrier(group=g)"
    ),
    "and": "def f(g: ProcessGroup | None):\n    return g is not None and dist.get_rank(g)",
    "comprehension": (
        "def f(gs: list[ProcessGroup | None]):\n"
        "    return [dist.get_rank(g) for g in gs if g is not None]"
    ),
    "loop": (
        "def f(gs: list[ProcessGroup | None]):\n    for g in gs:\n"
        "        if g is None:\n            continue\n        dist.barrier(group=g)"
    ),
    "point to point": "def f(t, g: ProcessGroup):\n    dist.P2POp(dist.isend, t, 1, g)",
    "no group to give": "dist.is_initialized()\ndist.init_process_group('gloo')",
    "annotation": (
        "from torch.distributed.device_mesh import DeviceMesh\n"
        "def f(m: DeviceMesh): return m.size()"
    ),
    "checkpoint": (
        "import torch.distributed.checkpoint as dcp\n"
        "def f(s, g: ProcessGroup):\n    dcp.save(s, checkpoint_id='x', process_group=g)"
    ),
    "unrelated name": "def all_reduce(t): ...\nall_reduce(1)",
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_a_legitimate_use_is_not_found(name: str) -> None:
    assert found(HEAD + LEGITIMATE[name]) == []


# The allowlist can only shrink

BARRIER = "import torch.distributed as d\ndef f():\n    d.barrier()\n"
KEY = "gtpgraph/planted.py f torch.distributed.barrier"


def test_the_allowlist_covers_one_use_per_entry_and_a_stale_entry_fails() -> None:
    one = check({"gtpgraph/planted.py": BARRIER})
    two = check({"gtpgraph/planted.py": BARRIER + "    d.barrier()\n"})
    assert complaints(one, f"# ceiling: 1\n{KEY}  # a reason") == []
    assert len(complaints(one, "# ceiling: 1\n")) == 1
    assert len(complaints(two, f"# ceiling: 1\n{KEY}")) == 1
    assert complaints(two, f"# ceiling: 2\n{KEY}\n{KEY}") == []
    assert "stale entry" in complaints([], f"# ceiling: 1\n{KEY}")[0]
    assert "2 entries, the ceiling is 1" in complaints(two, f"# ceiling: 1\n{KEY}\n{KEY}")[0]
    with pytest.raises(ValueError, match="expected a line '# ceiling: N'"):
        read_allowlist(KEY)


def test_each_allowlist_entry_has_a_reason() -> None:
    entries = [line for line in ALLOWLIST.read_text().splitlines() if not line.startswith("#")]
    assert all(line.partition("#")[2].strip() for line in entries if line.strip())


def test_the_ceiling_has_never_risen() -> None:
    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    path = ALLOWLIST.relative_to(ROOT)
    commits = git("log", "--format=%H", "--", str(path)).split()
    if not commits:
        pytest.skip("no committed allowlist to compare with")
    ceilings = [read_allowlist(text)[0] for c in commits if (text := git("show", f"{c}:{path}"))]
    newest_first = [read_allowlist(ALLOWLIST.read_text())[0], *ceilings]
    assert newest_first == sorted(newest_first)
