"""Between host and device: lists go up without waiting, and results come down in one read.

A read waits for everything the device was given before, so a step has one.  Tests count calls of ``read``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(values: Sequence[Any], device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Return a (nested) list as a tensor on the device; through pinned memory, so that the host goes on at once."""
    tensor = torch.tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def read(*tensors: Tensor) -> list[NDArray[Any]]:
    """Bring tensors of int64, int32, bool or float32 to the host, all in one transfer; shapes and kinds are kept."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    packed = torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]).cpu().numpy()
    found, start = [], 0
    for tensor in tensors:
        stop = start + tensor.numel() * tensor.element_size()
        kind = np.dtype(str(tensor.dtype).removeprefix("torch."))
        found.append(packed[start:stop].copy().view(kind).reshape(tuple(tensor.shape)))
        start = stop
    return found
