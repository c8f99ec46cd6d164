"""``python bench/hf_table.py [CLASS ...] [--modes eager,fx,inductor] [--out FILE]``: classes of
transformers under every lowering, on four gloo ranks of this machine (gtp 2 x dp 2).

Every rank has its own batch. A row says how far the gradients are from plain PyTorch's on the
concatenated batch, how many reports a step made against the backward executions of eager autograd,
and how many regions there are. Status 1 when a class failed, a count differs or an error is over
its bar. Rows are appended to FILE as JSON.

Error: the largest absolute difference over the largest gradient of the weight, or over 1e-3 of the
largest of the model where that is larger (the gradient of a key bias, say, is zero but for
rounding).
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script, in a bare checkout

import gtpgraph as gg  # noqa: E402
from bench.job import job_groups  # noqa: E402
from gtpgraph.models import load_factory  # noqa: E402
from gtpgraph.testing import fp64_grads, run_ranks  # noqa: E402

CLASSES = (
    "LlamaForCausalLM",
    "LlamaForCausalLM?tie_word_embeddings=true",
    "GPT2LMHeadModel",
    "BertForMaskedLM",
    "T5ForConditionalGeneration",
    "BartForConditionalGeneration",
    "WhisperForConditionalGeneration",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "GemmaForCausalLM",
    "OPTForCausalLM",
    "MambaForCausalLM",
    "ViTForImageClassification",
)
BARS = {"eager": 5e-6, "fx": 5e-6, "inductor": 1e-5}
FLOOR = 1e-3


def executions(model: torch.nn.Module, loss: torch.Tensor) -> Counter[str]:
    """Backward executions by weight: gathers that autograd's graph of `loss` reaches."""
    names = {id(p): n for n, p in model.named_parameters()}
    found: Counter[str] = Counter()
    seen, stack = set(), [loss.grad_fn]
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            variable = getattr(following, "variable", None)
            if variable is not None and id(variable) in names:
                gather = "Gather" in type(node).__name__ or "gather" in node.name()
                found[names[id(variable)]] += 1 if gather else 0
                found.setdefault(names[id(variable)], 0)
            stack.append(following)
    return Counter({name: max(n, 1) for name, n in found.items()})


def errors(wrapper: Any, expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """(largest error, its weight); a collective."""
    largest = max(float(g.abs().max()) for g in expected.values())
    worst = (0.0, "")
    for name, grad in expected.items():
        scale = max(float(grad.abs().max()), FLOOR * largest)
        difference = float((wrapper.full_grad(name).double() - grad.double()).abs().max())
        worst = max(worst, (difference / scale, name))
    return worst


def on_rank(rank: int, world: int, name: str, modes: list[str]) -> list[dict[str, Any]]:
    """The rows of one class."""
    groups = job_groups(dp=world // 2, gtp=2)
    torch.manual_seed(0)
    model, make_batch, loss_fn = load_factory(f"hf:{name}")
    assert loss_fn is not None
    batches = [make_batch(0, r, "cpu") for r in range(world)]
    expected = fp64_grads(model, batches, torch.float32, loss_fn)
    wrapper = gg.DistributedDataParallel(
        gg.shard(model, groups), groups, bucket_mb=0.05, timeout_s=900
    )
    owed = executions(wrapper.module, loss_fn(wrapper(*batches[rank])))
    rows = []
    for mode in modes:
        torch.compiler.reset()
        call: Any = wrapper
        if mode != "eager":
            call = gg.compile(wrapper, lowering={"fx": "eager"}.get(mode, mode))
        start = time.perf_counter()
        for _ in range(2):
            wrapper.zero_grad_buffer()
            loss_fn(call(*batches[rank])).backward()
            wrapper.finish_grad_sync()
        seconds = time.perf_counter() - start
        reports = Counter(r.weight for r in wrapper.reports)
        error, weight = errors(wrapper, expected)
        rows.append(
            {
                "class": name, "mode": mode, "error": error, "weight": weight,
                "reports": sum(reports.values()), "executions": sum(owed.values()),
                "different": sorted(n for n in owed | reports if owed[n] != reports[n]),
                "regions": 0 if mode == "eager" else len(call.plan.regions),
                "uses": max(reports.values()), "seconds": seconds,
            }
        )  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("classes", nargs="*", default=CLASSES)
    parser.add_argument("--modes", default="eager,fx")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    failed = 0
    for name in options.classes:
        try:
            rows = run_ranks(on_rank, 4, name, options.modes.split(","), timeout_s=1800)[0]
        except Exception as error:  # one class must not cost the others their rows
            print(f"{name:44} {type(error).__name__}: {str(error)[-3000:]}", flush=True)
            failed += 1
            continue
        for row in rows:
            bad = bool(row["different"]) or row["error"] > BARS[row["mode"]]
            failed += bad
            print(
                f"{name:44} {row['mode']:8} error {row['error']:.1e}  reports {row['reports']:3} "
                f"of {row['executions']:3}  regions {row['regions']}  most uses {row['uses']}  "
                f"{row['seconds']:.0f} s {'FAILED ' + str(row['different']) if bad else ''}",
                flush=True,
            )
        if options.out:
            with options.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
