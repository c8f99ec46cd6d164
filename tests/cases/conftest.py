"""Every case starts with an empty compile cache: recompile limits count per process."""

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()
