"""Checkpoints: saved in the background, atomic on disk, read at another gtp or dp degree.

In: a wrapped model and its optimizer. Out: folders in the format of
``torch.distributed.checkpoint``, each complete or absent::

    save(step)  plans agreed over the model's group -> copies on the CPU     (the caller waits)
                write step-N.tmp -> told through the store -> rename to step-N      (a thread)
    load()      newest complete folder -> each rank reads the elements it owns

A folder is complete when it has its final name. The thread talks through the job's store, never in
a collective, so training goes on meanwhile. All ranks need one file system.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, SavePlan

from gtpgraph.parallel import checkpoint_state as content
from gtpgraph.parallel.checkpoint_files import Commit, Folders
from gtpgraph.parallel.data_parallel import DistributedDataParallel
from gtpgraph.parallel.flat_state import FlatLoadPlanner, FlatSavePlanner
from gtpgraph.parallel.optimizer import DistributedOptimizer
from gtpgraph.parallel.process_groups import UNSET

__all__ = ["Checkpointer"]

_FUNCTION = "Checkpointer"
_EXTRA = "extra"


class Checkpointer:
    """Saves and loads one model, and its optimizer, in a folder of checkpoints.

    Args:
        folder: where ``step-N`` folders are made; created if absent.
        model: the wrapper.
        optimizer: its optimizer; None for the weights alone.
        keep: complete checkpoints that stay, the newest ones; None keeps all.
        timeout_s: how long a rank waits for the others to have written, in seconds.

    Raises:
        ValueError: a group is missing that the ranks agree over: model, dp (for the optimizer's
            keys), and expt_dp under expert parallelism.
    """

    def __init__(
        self,
        folder: str | Path,
        model: DistributedDataParallel,
        optimizer: DistributedOptimizer | None = None,
        *,
        keep: int | None = 2,
        timeout_s: float = 600.0,
    ) -> None:
        groups = model.groups
        needed = {"model": "every checkpoint (the ranks that write it)"}
        if optimizer is not None:
            needed["dp"] = "the keys of the optimizer's state"
            if groups.ep is not UNSET and groups.size("ep") > 1:
                needed["expt_dp"] = "the keys of the experts' optimizer state (ep > 1)"
        found = groups.require(*needed, function=_FUNCTION, option=needed)
        if keep is not None and keep < 1:
            raise ValueError(f"{_FUNCTION}: keep: expected at least 1 or None, got {keep}.")
        self._model_group: ProcessGroup | None = found["model"]
        self._ranks, self._place = groups.ranks("model"), groups.rank("model")
        self._model, self._optimizer = model, optimizer
        self._scopes = content.Scopes(model)
        self.folders = Folders(Path(folder), keep)
        self._commit = Commit(self._ranks, self._place, timeout_s)
        self._thread: Thread | None = None
        self._error: Exception | None = None

    # -- save -----------------------------------------------------------------------------------

    def save(self, step: int, extra: Any = None, *, wait: bool = False) -> None:
        """Save after `step`; returns once the state has been copied (`wait`: is on disk).

        A collective over the model's ranks. `extra` is any picklable object, alike on all ranks.

        Raises:
            RuntimeError: an earlier save failed, or this one cannot be written, on any rank.
        """
        self.wait()
        temporary = self.folders.temporary(step)
        if self._place == 0:
            self.folders.discard(temporary)  # what a killed job has left
        planner, writer = FlatSavePlanner(), FileSystemWriter(temporary)
        local: SavePlan | str
        try:
            local = self._local_plan(planner, writer, step, extra)
        except Exception as error:
            local = f"{type(error).__name__}: {error}"
        plan, metadata = self._agree(planner, writer, local)
        planner.stage(plan)
        number = self._commit.next()

        def write() -> None:
            try:
                self._commit.run(
                    number,
                    lambda: writer.write_data(plan, planner).value(),
                    lambda results: self.folders.publish(writer, metadata, results, step),
                )
            except Exception as error:
                self._error = error

        self._thread = Thread(target=write, name=f"checkpoint-{step}")
        self._thread.start()
        if wait:
            self.wait()

    def _local_plan(
        self, planner: FlatSavePlanner, writer: FileSystemWriter, step: int, extra: Any
    ) -> SavePlan:
        state = content.model_state(self._model, self._scopes)
        if self._optimizer is not None:
            content.gather_keys(self._optimizer, self._model.groups, self._scopes)
            state |= content.optimizer_state(self._optimizer, self._scopes)
        state[_EXTRA] = {"step": step, "world": self._model.groups.world(), "user": extra}
        first = self._place == 0
        planner.set_up_planner(state, is_coordinator=first)
        writer.set_up_storage_writer(first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def _agree(
        self, planner: FlatSavePlanner, writer: FileSystemWriter, local: SavePlan | str
    ) -> tuple[SavePlan, Any]:
        """This rank's final plan, and on the first rank the metadata of all of them."""
        first, group = self._place == 0, self._model_group
        plans: list[Any] = [local]
        if group is not None:
            plans = [None] * len(self._ranks)
            dist.gather_object(local, plans if first else None, dst=self._ranks[0], group=group)
        answer: list[Any] = [None] * len(self._ranks)
        metadata = None
        if first:
            try:
                wrong = [f"rank {r}: {p}" for r, p in zip(self._ranks, plans, strict=True)
                         if isinstance(p, str)]  # fmt: skip
                if wrong:
                    raise RuntimeError("; ".join(wrong))
                planned, metadata = planner.create_global_plan(plans)
                answer = list(writer.prepare_global_plan(planned))
            except Exception as error:
                answer = [f"{error}"] * len(self._ranks)
        mine = answer[:1]
        if group is not None:
            dist.scatter_object_list(
                mine, answer if first else None, src=self._ranks[0], group=group
            )
        if isinstance(mine[0], str):
            raise RuntimeError(f"{_FUNCTION}.save: expected a plan of every rank, got {mine[0]}")
        return planner.finish_plan(mine[0]), metadata

    def wait(self) -> None:
        """Wait until the last save is on disk, for all ranks.

        Raises:
            RuntimeError: it failed, on any rank; the checkpoint is absent then.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(f"{_FUNCTION}: the last save failed: {error}") from error

    # -- load -----------------------------------------------------------------------------------

    def latest(self) -> int | None:
        """The newest complete checkpoint's step, None without one."""
        return max(self.folders.steps(), default=None)

    def load(self, step: int | None = None) -> tuple[int, Any] | None:
        """Load the checkpoint of `step`, by default the newest: (step, extra), None without one.

        The gtp and dp degrees, bucket sizes and optimizer implementation may be others than those
        of the job that saved it. A collective over the model's ranks; the first one's choice holds.

        Raises:
            ValueError: it is absent, or has other weights or shapes than the model: all of them.
            RuntimeError: a rank cannot read its part.
        """
        self.wait()
        chosen = self._together(self.latest() if step is None else step)[0]
        if chosen is None:
            return None
        found: Any = None
        problem: Exception | None = None
        try:
            found = self._read(chosen)
        except Exception as error:
            problem = error
        texts = [t for t in dict.fromkeys(self._together(problem and str(problem))) if t]
        if texts:
            kind = ValueError if isinstance(problem, ValueError) else RuntimeError
            raise kind("\n".join(texts)) from problem
        return chosen, found["user"]

    def _read(self, step: int) -> Mapping[str, Any]:
        folder = self.folders.final(step)
        if step not in self.folders.steps():
            raise ValueError(
                f"{_FUNCTION}.load: expected a complete checkpoint in {folder}, found those of "
                f"steps {self.folders.steps() or 'none'}."
            )
        reader = FileSystemReader(folder)
        metadata = reader.read_metadata()
        saved = metadata.state_dict_metadata
        state: dict[str, Any] = content.model_state(self._model, self._scopes)
        if self._optimizer is not None:
            state |= content.room(self._optimizer, self._scopes, saved)
        state[_EXTRA] = None
        self._check(folder, state, saved)
        planner = FlatLoadPlanner()
        # Every rank reads for itself, so each is the coordinator of a job of one.
        planner.set_up_planner(state, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
        reader.read_data(planner.finish_plan(plan), planner).wait()
        content.adopt_objects(self._model, self._scopes, state)
        if self._optimizer is not None:
            content.adopt_optimizer(self._optimizer, self._scopes, state)
        extra: Mapping[str, Any] = state[_EXTRA]
        return extra

    def _check(self, folder: Path, state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        problems = [f"{key}: not in the checkpoint" for key in state if key not in saved]
        for key, value in state.items():
            want, have = getattr(value, "shape", None), getattr(saved.get(key), "size", None)
            if key in saved and want is not None and have != want:
                problems.append(f"{key}: expected {tuple(want)}, the checkpoint has {have}")
        if problems:
            shown = "\n".join(f"  {p}" for p in problems[:20])
            more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
            raise ValueError(
                f"{_FUNCTION}.load: {folder} does not fit this model:\n{shown}{more}\nRemedy: the "
                "same model, with the same pp, tp and ep; gtp and dp may differ"
            )

    def _together(self, value: Any) -> list[Any]:
        """`value` of every rank of the model, in order."""
        if self._model_group is None:
            return [value]
        values: list[Any] = [None] * len(self._ranks)
        dist.all_gather_object(values, value, group=self._model_group)
        return values

    def close(self) -> None:
        """Wait for a save that is under way, whatever becomes of it. Idempotent."""
        with contextlib.suppress(RuntimeError):
            self.wait()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.wait()
        else:
            self.close()
