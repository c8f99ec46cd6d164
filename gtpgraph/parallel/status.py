"""Agreement between the ranks of one model through the job's key-value store, with a timeout.

Never a collective: a rank that is missing or failed would leave the others waiting in it for ever.
Every rank posts, one decides, all read the decision; when somebody does not come, the others learn
who, within the timeout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from gtpgraph import compat

_counters: dict[tuple[int, ...], int] = {}


Left = Mapping[str, Sequence[int]]  # by side (see `side_key`): buckets that left, in order


def side_key(ranks: Sequence[int]) -> str:
    """The ranks of a bucket's group as a key."""
    return ".".join(map(str, ranks))


class StepFault(RuntimeError):
    """Some rank has a fault, and all of them know.

    `missing` is what makes their collectives match again: by side, every bucket that left on any
    rank, in order. None: two ranks launched reductions in different orders, which never match.
    """

    def __init__(self, text: str, missing: dict[str, list[int]] | None) -> None:
        super().__init__(text)
        self.missing = missing


def longest_order(lefts: Sequence[Left]) -> dict[str, list[int]] | None:
    """By side the longest of the ranks' orders; None unless every other one is its beginning."""
    longest: dict[str, list[int]] = {}
    for left in lefts:
        for side, order in left.items():
            known, new = longest.get(side, []), list(order)
            short, long = sorted((known, new), key=len)
            if long[: len(short)] != short:
                return None
            longest[side] = long
    return longest


class Exchange:
    """The store as the ranks of one model use it.

    Args:
        ranks: global ranks that hold the model, the same tuple on each of them.
        rank: this rank.
        timeout_s: longest wait for the others, in seconds.
        store: None for the job's own.

    Construct it in the same order on all `ranks`: models on the same ranks are told apart by it.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        *,
        timeout_s: float,
        store: dist.Store | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.timeout = timedelta(seconds=timeout_s)
        count = _counters[self.ranks] = _counters.get(self.ranks, -1) + 1
        self._prefix = f"gtpgraph/{'.'.join(map(str, self.ranks))}/{count}"
        self._own_store = store
        self._step = 0

    @property
    def _store(self) -> dist.Store:
        return self._own_store if self._own_store is not None else compat.default_store()

    def step_status(self, faults: Sequence[str], left: Left | None = None) -> None:
        """Tell the others how this rank's step went, and learn how theirs did.

        Args:
            faults: what is wrong here, a line each.
            left: the reductions that this rank has launched in the step.

        Raises:
            StepFault: any rank has a fault; the same text everywhere.
            RuntimeError: a rank does not come in time.
        """
        self._step += 1
        key = f"{self._prefix}/step/{self._step}"
        store, mine = self._store, f"{key}/{self.rank}"
        posted = {"faults": list(faults), "left": {k: list(v) for k, v in (left or {}).items()}}
        store.set(mine, json.dumps(posted))
        if faults:
            store.add(f"{key}/faults", 1)
        if store.add(f"{key}/arrived", 1) == len(self.ranks):
            self._forget_step(self._step - 2)
            faulty = store.add(f"{key}/faults", 0) > 0
            store.set(f"{key}/verdict", self._gather_faults(key) if faulty else "")
        verdict = self._await(f"{key}/verdict", lambda: self._absent(key))
        if verdict:
            found = json.loads(verdict)
            raise StepFault(found["text"], found["missing"])

    def _gather_faults(self, key: str) -> str:
        posted = {r: json.loads(self._store.get(f"{key}/{r}")) for r in self.ranks}
        lines = [f"  rank {r}: {line}" for r, p in posted.items() for line in p["faults"]]
        text = "the step's reports are not what is owed:\n" + "\n".join(lines)
        missing = longest_order([p["left"] for p in posted.values()])
        return json.dumps({"text": text, "missing": missing})

    def _absent(self, key: str) -> list[int]:
        return [r for r in self.ranks if not self._store.check([f"{key}/{r}"])]

    def _forget_step(self, step: int) -> None:
        key = f"{self._prefix}/step/{step}"
        for name in (*map(str, self.ranks), "faults", "arrived", "verdict"):
            self._store.delete_key(f"{key}/{name}")

    def _await(self, key: str, absent: Callable[[], list[int]]) -> str:
        try:
            self._store.wait([key], self.timeout)
        except dist.DistStoreError as error:
            seconds = self.timeout.total_seconds()
            raise RuntimeError(
                f"expected ranks {list(self.ranks)} within {seconds:g} s, rank(s) {absent()} did "
                "not come: look there for an earlier error, a rank that skipped "
                "finish_grad_sync(), or one that alone compiled again."
            ) from error
        return self._store.get(key).decode()

    def agree(
        self, name: str, payload: str, judge: Callable[[Mapping[int, str]], str | None]
    ) -> None:
        """Compare one text of every rank; `judge` returns what is wrong with them, or None.

        Raises:
            RuntimeError: with the judge's text, on every rank; or a rank does not come in time.
        """
        key = f"{self._prefix}/agree/{name}"
        self._store.set(f"{key}/{self.rank}", payload)
        if self.rank == self.ranks[0]:
            keys = {r: f"{key}/{r}" for r in self.ranks}
            try:
                self._store.wait(list(keys.values()), self.timeout)
                texts = {r: self._store.get(k).decode() for r, k in keys.items()}
                verdict = judge(texts) or ""
            except dist.DistStoreError:
                verdict = (
                    f"{name}: expected every rank of {list(self.ranks)} within "
                    f"{self.timeout.total_seconds():g} s, rank(s) {self._absent(key)} absent: "
                    f"did rank {self.rank} alone compile again? Give every rank the same shapes."
                )
            self._store.set(f"{key}/verdict", verdict)
        verdict = self._await(f"{key}/verdict", lambda: self._absent(key))
        if verdict:
            raise RuntimeError(verdict)
