"""The peak of the memory that something takes on top of what is there already."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class Peak:
    """What was measured.

    Attributes:
        bytes: on all of the model's GPUs together, or else of the process; None where it cannot be measured.
    """

    bytes: int | None = None


@contextmanager
def measured_peak(model: PreTrainedModel) -> Iterator[Peak]:
    """Measure the peak while the body runs; it is there afterwards."""
    peak = Peak()
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    if devices:
        before = sum(map(torch.cuda.memory_allocated, devices))
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = sum(map(torch.cuda.max_memory_allocated, devices)) - before
    elif _reset():
        before = _resident("VmRSS")
        yield peak
        peak.bytes = max(_resident("VmHWM") - before, 0)
    else:
        yield peak


def _reset() -> bool:
    """Set the high-water mark of the process to what is resident now; False where the system has none."""
    if not sys.platform.startswith("linux"):
        return False
    with suppress(OSError, AttributeError):  # of another C library
        # Memory that was freed but not given back would count as resident now, and be used again unseen.
        ctypes.CDLL(None).malloc_trim(0)
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _resident(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
