"""The command line: ``gtpgraph`` and ``python -m gtpgraph``.

In: arguments. Out: an exit status. 0: done; 1: a check failed, plans differ, or the work raised;
2: bad usage (an option, a file, a model or a pattern that cannot be what was meant).
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata

from gtpgraph.config import LOWERINGS, JobConfig, make_config

OK, FAILED, USAGE = 0, 1, 2

_MODEL_HELP = "a built-in name, package.module:factory or file.py:factory"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except (ValueError, RuntimeError, NotImplementedError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader (head, less) has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return OK
        if args.traceback:
            traceback.print_exc()
        print(f"gtpgraph {args.command}: error: {error}", file=sys.stderr)
        return USAGE if isinstance(error, (ValueError, OSError)) else FAILED
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `run`, which takes the arguments."""
    parser = argparse.ArgumentParser(
        prog="gtpgraph",
        description="Readiness of gradients as part of a model's captured backward graph.",
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_inspect(commands)
    _add_compile(commands)
    _add_bench(commands)
    _add_diff(commands)
    _add_train(commands)
    _add_demo(commands)
    for command in commands.choices.values():
        command.add_argument(
            "--traceback", action="store_true", help="show the Python traceback of an error"
        )
    return parser


def _version() -> str:
    try:
        return metadata.version("gtpgraph")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "not installed"


_Commands = argparse._SubParsersAction  # argparse has no public name for it


def _add_job_options(parser: argparse.ArgumentParser, *, lowering: str, fake: bool) -> None:
    parser.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    group = parser.add_argument_group("ranks")
    group.add_argument(
        "--ranks", type=int, metavar="N", help="start N gloo ranks here (under torchrun: its own)"
    )
    group.add_argument("--gtp", type=int, metavar="N", help="ranks that share a weight")
    group.add_argument("--dp", type=int, metavar="N", help="ranks with other data")
    if fake:
        group.add_argument(
            "--fake-world", type=int, metavar="N", help="plan for N ranks in this process alone"
        )
    parser.add_argument(
        "--lowering", choices=LOWERINGS, default=lowering, help=f"default: {lowering}"
    )
    parser.add_argument(
        "--ungraphed", action="append", default=[], metavar="PATTERN",
        help="weights that eager Python finalises (fnmatch over names; may be repeated)",
    )  # fmt: skip
    parser.add_argument(
        "--bucket-mb", type=float, default=32.0, metavar="MB", help="bucket size; default: 32"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is one, unless gloo"
    )


def job_of(args: argparse.Namespace) -> JobConfig:
    """The job that a command's options describe (ValueError: they do not fit together)."""
    import torch

    return make_config(
        args.model,
        ranks=args.ranks,
        gtp=args.gtp,
        dp=args.dp,
        fake_world=getattr(args, "fake_world", None),
        lowering=args.lowering,
        ungraphed=args.ungraphed,
        bucket_mb=args.bucket_mb,
        device=args.device,
        cuda=torch.cuda.is_available(),
    )


def _add_inspect(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("inspect", help="print the hook plan; no step is run")
    # The plan does not depend on the lowering, and FX compiles in a fraction of the time.
    _add_job_options(parser, lowering="eager", fake=True)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--out", metavar="FILE", help="write it to FILE instead of stdout")
    parser.add_argument(
        "--against", metavar="PLAN", help="compare with a plan file; status 1 if it differs"
    )
    parser.set_defaults(run=_run_inspect)


def _add_compile(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("compile", help="write the plan and the graphs to a folder")
    _add_job_options(parser, lowering="inductor", fake=True)
    parser.add_argument("--out", metavar="DIR", required=True, help="made if it does not exist")
    parser.set_defaults(run=_run_compile)


def _add_bench(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="time eager and compiled steps, interleaved")
    _add_job_options(parser, lowering="inductor", fake=False)
    parser.add_argument(
        "--modes",
        default="eager,compiled",
        metavar="LIST",
        help="of eager, compiled, captured (CUDA graphs); default: eager,compiled",
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="per mode; default: 20")
    parser.add_argument("--json", action="store_true", help="benchmark rows, one a line")
    parser.set_defaults(run=_run_bench)


def _add_diff(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("diff", help="compare two plan files; status 1 if they differ")
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.set_defaults(run=_run_diff)


def _add_train(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("train", help="train a model, with checkpoints and metrics")
    _add_job_options(parser, lowering="inductor", fake=False)
    group = parser.add_argument_group("training")
    group.add_argument("--steps", type=int, required=True, metavar="N", help="the last step")
    group.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="of checkpoints and metrics.jsonl"
    )
    group.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint, if there is one"
    )
    group.add_argument("--every", type=int, default=100, metavar="N", help="save every N steps")
    group.add_argument("--mode", choices=("eager", "compiled", "captured"), default="eager")
    group.add_argument("--lr", type=float, default=3e-4)
    group.add_argument("--weight-decay", type=float, default=0.1)
    group.add_argument("--clip", type=float, default=1.0, metavar="NORM", help="0: no clipping")
    group.add_argument("--seed", type=int, default=0, help="number of the first batch")
    parser.set_defaults(run=_run_train)


def _add_demo(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("demo", help="train a small MTP model on 4 ranks, with checks")
    parser.add_argument("--lowering", choices=LOWERINGS, default="inductor")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="default: 20")
    parser.set_defaults(run=_run_demo)


# A command's module is imported when it runs: --help and a wrong option need no torch.


def _run_inspect(args: argparse.Namespace) -> int:
    from gtpgraph.cli_inspect import run_inspect

    return run_inspect(job_of(args), args.format, args.out, args.against)


def _run_compile(args: argparse.Namespace) -> int:
    from gtpgraph.cli_compile import run_compile

    return run_compile(job_of(args), args.out)


def _run_bench(args: argparse.Namespace) -> int:
    from gtpgraph.cli_bench import run_bench

    return run_bench(job_of(args), args.modes, args.steps, as_json=args.json)


def _run_diff(args: argparse.Namespace) -> int:
    from gtpgraph.cli_inspect import run_diff

    return run_diff(args.a, args.b)


def _run_train(args: argparse.Namespace) -> int:
    from gtpgraph.train import TrainOptions, run_train

    options = TrainOptions(
        args.steps, args.checkpoint, args.resume, args.every, args.mode, args.lr,
        args.weight_decay, args.clip or None, args.seed,
    )  # fmt: skip
    return run_train(job_of(args), options)


def _run_demo(args: argparse.Namespace) -> int:
    from gtpgraph.demo import run_demo

    return run_demo(lowering=args.lowering, steps=args.steps)
