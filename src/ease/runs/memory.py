"""Peak memory of a piece of work."""

import sys
from contextlib import suppress
from pathlib import Path

import torch


def forget_peak_memory(device: torch.device) -> None:
    """Reset the peak of this process (Linux and CUDA only)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process since the reset, on the GPU if it computes there; 0 if unknown."""
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
