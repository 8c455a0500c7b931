"""LoRA of a linear that holds zeros: only what is not zero is updated, so that merging changes nothing but names.

The mask on the update is SparsePEFT's (Muñoz, Yuan and Jain, 2024, arXiv 2410.03750), read off the weight instead of
kept beside it. That the sum is computed again for the backward pass is an idea of LoRS (Hu et al., 2025, arXiv
2501.08582), whose other parts are not taken over.
"""

from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

if TYPE_CHECKING:
    from peft.tuners.lora import Linear


def updated(W: Tensor, A: Tensor, B: Tensor, scale: float, *, masked: bool, base: bool = True) -> Tensor:
    """Compute `W + scale * B A`, and leave zeros of `W` zero if `masked`.

    Args:
        W: weight, `(d_out, d_in)`; its zeros are the mask, so that none has to be kept beside it.
        A: `(rank, d_in)`.
        B: `(d_out, rank)`.
        scale: of the update.
        masked: whether zeros stay.
        base: whether to add `W`; else the update alone is returned.

    Returns:
        `(d_out, d_in)`, float32 or wider: small updates of a 16-bit weight are not lost before the sum.
    """
    dtype = torch.promote_types(W.dtype, torch.float32)
    with torch.autocast(W.device.type, enabled=False):  # it would take the product in 16 bits
        update = (scale * B.to(dtype)) @ A.to(dtype)
    if masked:
        update.mul_(W != 0)  # a tenth of the time of masked_fill_ on a CPU
    return update.add_(W) if base else update


class _MaskedLinear(torch.autograd.Function):
    """`y = x E^T + bias` with `E = W + scale * M * (B A)`, or without its first term; `M` is 0 where `W` is, else 1.

    Autograd would keep `E`, as large as `W`, of every linear until the backward pass. Here it is computed again there,
    at `rank` multiplications for each weight. In 16 bits `E` is rounded, as it is by the merge; its gradient is passed
    on as if it were not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, scale: float, base: bool):
        ctx.save_for_backward(x, W, A, B)
        ctx.scale, ctx.base = scale, base
        return F.linear(x, updated(W, A, B, scale, masked=True, base=base).to(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (grad,) = grads
        x, W, A, B = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = grad @ updated(W, A, B, ctx.scale, masked=True, base=ctx.base).to(grad.dtype)
        dE = grad.flatten(0, -2).T @ x.flatten(0, -2)  # (d_out, d_in)
        dE = dE.mul_(W != 0).to(A.dtype).mul_(ctx.scale)
        return dx, None, None, B.T @ dE, dE @ A.T, None, None


def masked_linear(x: Tensor, linear: nn.Linear, A: Tensor, B: Tensor, scale: float, *, base: bool = True) -> Tensor:
    """Apply a frozen linear with its masked update; gradients go to `x`, `A` and `B`.

    Args:
        x: `(..., d_in)`.
        linear: its zeros are the mask.
        A: `(rank, d_in)`.
        B: `(d_out, rank)`.
        scale: of the update.
        base: whether weight and bias are applied too, or the update alone.

    Returns:
        `(..., d_out)`, dtype of `x`, or that of autocast.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    result = _MaskedLinear.apply(x, linear.weight, linear.bias if base else None, A, B, scale, base)
    return result  # pyright: ignore[reportReturnType]


def masked_layer(
    pruned: Collection[nn.Linear], target: nn.Linear, adapter_name: str, **options: Any
) -> "Linear | None":
    """Build the LoRA layer of a linear whose zeros pruning made; None, by which PEFT builds its own, for any other.

    Meant for PEFT's dispatch of custom modules, whose arguments are all but the first.

    Args:
        pruned: linears whose zeros stay.
        target: the linear to train.
        adapter_name: of PEFT.
        options: of PEFT's layer.
    """
    return _layer_class()(target, adapter_name, **options) if target in pruned else None


@cache
def _layer_class() -> "type[Linear]":
    """Make the class when the first adapter is attached: PEFT is not imported before."""
    from peft.tuners.lora import Linear

    class MaskedLinear(Linear):
        """PEFT's LoRA of a linear, with the update masked by the zeros of the weight."""

        def get_delta_weight(self, adapter: str) -> Tensor:
            linear: Any = self.get_base_layer()
            return super().get_delta_weight(adapter).masked_fill(linear.weight == 0, 0)

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.disable_adapters or self.merged:
                return super().forward(x, *args, **kwargs)
            (adapter,) = self.active_adapters
            linear: Any = self.get_base_layer()
            update: Any = self.lora_A[adapter].weight, self.lora_B[adapter].weight, self.scaling[adapter]
            dropout = self.lora_dropout[adapter]
            if self.training and isinstance(dropout, nn.Dropout):
                return linear(x) + masked_linear(dropout(x), linear, *update, base=False)
            return masked_linear(x, linear, *update)

    return MaskedLinear
