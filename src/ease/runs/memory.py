"""The most memory that a piece of work held."""

import sys
from contextlib import suppress
from pathlib import Path

import torch


def forget_peak_memory(device: torch.device) -> None:
    """Start anew, so that the peak of earlier work in this process is not counted; Linux and CUDA only."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Most bytes this process has held since, on the GPU where it works there; 0 where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    try:
        import resource
    except ImportError:  # Windows has none
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
