"""Peak memory, also where the system tells little of it."""

import sys
from pathlib import Path

import numpy as np
import torch

from ease.runs.memory import forget_peak_memory, peak_memory

CPU = torch.device("cpu")


def refuse(*_: object) -> str:
    raise OSError


def test_freed_memory_counts_towards_the_peak() -> None:
    forget_peak_memory(CPU)
    before = peak_memory(CPU)
    np.ones(1 << 23).sum()  # 64 MiB
    assert peak_memory(CPU) - before > 0.9 * (1 << 26)


def test_without_proc_and_resource_it_is_unknown_and_nothing_breaks(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)
    forget_peak_memory(CPU)
    assert peak_memory(CPU) == 0
