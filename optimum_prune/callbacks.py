"""Callbacks of transformers' Trainer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from optimum_prune.errors import InvalidConfig
from optimum_prune.sparsity import masks_of, match


class KeepMasks(TrainerCallback):
    """Keeps zeros while a transformers Trainer trains: after every step of the optimizer, masks are applied again.

    ```python
    Trainer(model, args, train_dataset=data, callbacks=[KeepMasks()]).train()
    ```

    Args:
        masks: as from `masks_of`; by default the zeros that pruning had made when training begins.
    """

    def __init__(self, masks: Mapping[str, Tensor] | None = None):
        self.masks = masks
        self._kept: list[tuple[nn.Linear, Tensor]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the weights that stay zero.

        Raises:
            InvalidConfig: there are none, or masks do not fit the model.
        """
        model = kwargs["model"]
        masks = masks_of(model) if self.masks is None else self.masks
        if not masks:
            raise InvalidConfig(
                "KeepMasks has nothing to keep: no linear holds a zero that pruning made. Prune first, or pass masks."
            )
        self._kept = match(model, masks)
        self._apply_()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Undo what the step did to masked weights."""
        self._apply_()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let go of the model."""
        self._kept = []

    @torch.no_grad()
    def _apply_(self) -> None:
        for linear, removed in self._kept:
            linear.weight.masked_fill_(removed, 0)
