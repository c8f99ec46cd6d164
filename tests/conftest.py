"""Fixtures that all tests share: long-lived gloo ranks, seeds, skips that say why."""

from collections.abc import Iterator

import pytest
import torch

from gtpgraph.testing import RankPool


def pytest_configure() -> None:
    torch.set_num_threads(1)  # the ranks and the other workers share the same few cores


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, this machine has none")
    num_devices = torch.cuda.device_count()
    if item.get_closest_marker("multi_gpu") and num_devices < 2:
        pytest.skip(f"needs 2 CUDA devices, this machine has {num_devices}")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    """Two gloo ranks: ``ranks2.run(fn, *args)`` calls ``fn(rank, 2, *args)`` on each."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    """Four gloo ranks: ``ranks4.run(fn, *args)`` calls ``fn(rank, 4, *args)`` on each."""
    with RankPool(4) as pool:
        yield pool
