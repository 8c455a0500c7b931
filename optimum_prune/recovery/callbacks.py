"""What looks on while a Trainer trains: a bar, and an end where no step can help any more."""

import math
from typing import Any

from transformers import TrainerCallback
from transformers.utils.logging import tqdm


class LossBar(TrainerCallback):
    """A progress bar of the steps, with the latest losses."""

    _bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the bar."""
        self._bar = tqdm(
            desc="Recovery",
            unit="step",
            total=state.max_steps,
            initial=state.global_step,
            disable=not state.is_world_process_zero,
        )
        self._shown: dict[str, str] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move it by a step."""
        self._bar.update(1)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Show what was logged."""
        for key, name in (("loss", "loss"), ("eval_loss", "held out")):
            if key in (logs or {}):
                self._shown[name] = f"{float((logs or {})[key]):.4f}"
        self._bar.set_postfix(self._shown)

    def close(self) -> None:
        """Close it, also after an error."""
        if self._bar is not None:
            self._bar.close()


class StopDiverged(TrainerCallback):
    """Ends a training whose held-out loss is not finite any more: no step mends that."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Ask for it."""
        if not math.isfinite(metrics["eval_loss"]):
            control.should_training_stop = True
