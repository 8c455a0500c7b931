"""2:4 at run time: hand weights with two zeros in every four to torch's sparse kernels (CUDA)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS
from transformers import PreTrainedModel

from optimum_prune.binding import named_linears
from optimum_prune.errors import UnsupportedModel

DEVICE = "cuda"
DTYPES = (torch.float16, torch.bfloat16)
MULTIPLES = {"cutlass": (32, 64), "cusparselt": (16, 16)}
"""Backend of torch -> what rows and columns of a 16-bit weight have to be multiples of."""
PROBE = 8
"""Rows of the input that the kernels are tried on."""


@dataclass(frozen=True)
class Acceleration:
    """What `accelerate_2_4_` did.

    Attributes:
        converted: module paths of the linears that run on 2:4 kernels now.
        left: module path of every other linear -> why it stays dense.
    """

    converted: list[str]
    left: dict[str, str]

    def __str__(self) -> str:
        total = len(self.converted) + len(self.left)
        lines = [f"{len(self.converted)} of {total} linears run on 2:4 kernels."]
        return "\n".join([*lines, *(f"dense: {name}: {reason}" for name, reason in self.left.items())])


@torch.no_grad()
def accelerate_2_4_(model: PreTrainedModel) -> Acceleration:
    """Run the 2:4 linears of a model on torch's semi-structured kernels, in place, for inference.

    Whether that is faster depends on the GPU, the shapes and the batch: measure it. Save the model before: weights in
    this form cannot be saved, pruned or trained. While it works, the new weights (9/16 of the old ones) are held beside
    the old ones, so that an error leaves the model as it was.

    Args:
        model: on a CUDA device, float16 or bfloat16, with two zeros in every four consecutive inputs of its linears.

    Returns:
        Which linears were converted, and why the others were not.

    Raises:
        UnsupportedModel: there is no CUDA device, the model is not on it, or it has no such kernels.
    """
    found = named_linears(model)
    _check_device(found)
    backend = _backend()
    left = {name: reason for name, linear in found.items() if (reason := why_dense(linear.weight, backend.BACKEND))}
    sparse: dict[str, Tensor] = {}
    try:
        for name in (name for name in found if name not in left):
            sparse[name] = backend.from_dense(found[name].weight.detach().contiguous())
        for weight in list(sparse.values())[:1]:
            # What the GPU cannot do, torch says in the first product.
            functional.linear(torch.zeros(PROBE, weight.shape[1], dtype=weight.dtype, device=weight.device), weight)
    except RuntimeError as error:
        raise UnsupportedModel(
            f"The 2:4 kernels of torch ({backend.BACKEND}) do not work on this GPU, and the model was left as it was: "
            f"{error}"
        ) from error
    for name, weight in sparse.items():
        found[name].weight = nn.Parameter(weight, requires_grad=False)
    return Acceleration(list(sparse), left)


def why_dense(weight: Tensor, backend: str) -> str | None:
    """Say why a weight cannot run on 2:4 kernels, or None if it can.

    Args:
        weight: `(d_out, d_in)`.
        backend: a key of `MULTIPLES`.
    """
    if weight.device.type != DEVICE:
        return f"it is on {weight.device.type}"
    if weight.dtype not in DTYPES:
        return f"{str(weight.dtype).removeprefix('torch.')}; the kernels take float16 and bfloat16"
    if weight.dim() != 2:
        return f"{weight.dim()} dimensions; the kernels take 2"
    rows, columns = MULTIPLES[backend]
    if weight.shape[0] % rows or weight.shape[1] % columns:
        return f"shape {list(weight.shape)}; {backend} takes multiples of ({rows}, {columns})"
    if full := int(((weight != 0).view(-1, 4).sum(dim=1) > 2).sum()):
        return f"not 2:4: {full:,} of {weight.numel() // 4:,} groups of 4 hold less than 2 zeros"
    return None


def _check_device(found: dict[str, nn.Linear]) -> None:
    if not torch.cuda.is_available():
        raise UnsupportedModel(
            "2:4 kernels run on CUDA (NVIDIA GPUs from Ampere on), and torch finds no such device. On a CPU the zeros "
            "of a 2:4 model are multiplied like any other weight; run it as it is."
        )
    devices = sorted({linear.weight.device.type for linear in found.values()})
    if DEVICE not in devices:
        raise UnsupportedModel(
            f"2:4 kernels run on CUDA, but the linears of the model are on {', '.join(devices)}. Call model.to('cuda') "
            "first."
        )


def _backend() -> Any:
    """Return torch's class for the better kernels that it was built with."""
    available = torch.backends.cusparselt.is_available()
    return SparseSemiStructuredTensorCUSPARSELT if available else SparseSemiStructuredTensorCUTLASS
