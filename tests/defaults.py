"""Other defaults of torch, as a user may have set them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def other_defaults(dtype: torch.dtype, device: str | None = "meta") -> Iterator[None]:
    """Let torch make tensors of another dtype, on another device, for a while.

    The meta device stands for a GPU: a tensor that is made there by mistake does not mix with those of the model.
    """
    try:
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
