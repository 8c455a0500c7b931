"""What a model is by now - dense, pruned, recovered -, what was measured of it, and how to get the dense one again."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel

from optimum_prune.calibration.data import CalibrationData
from optimum_prune.evaluation import DenseReference, dense_reference, evaluate_model
from optimum_prune.latency import measure_latency
from optimum_prune.measurements import Evaluation, Latency
from optimum_prune.recovery.adapter import adapted, merge_adapter_
from optimum_prune.recovery.teacher import beside

logger = logging.getLogger(__name__)

Folder = TemporaryDirectory[str]


@dataclass(frozen=True)
class DenseSide:
    """Measurements of a dense model, and what the KL to it takes, when the model itself is gone.

    Attributes:
        evaluation: of the dense model.
        reference: its predictions; None where they cannot be kept, and there is no KL.
    """

    evaluation: Evaluation
    reference: DenseReference | None

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        data: CalibrationData,
        *,
        batch_size: int,
        timed: Latency | None,
        keep_head: bool = False,
    ) -> "DenseSide":
        """Measure a dense model; `keep_head` as of `dense_reference`."""
        reference = dense_reference(model, data, batch_size=batch_size, keep_head=keep_head)
        evaluation = evaluate_model(model, data, batch_size=batch_size)
        return cls(evaluation.timed(timed) if timed else evaluation, reference)

    def is_of(self, data: CalibrationData) -> bool:
        """Tell whether it was measured on this data."""
        return self.evaluation.data["fingerprint"] == data.fingerprint


class Stages:
    """The stages that one model goes through.

    Attributes:
        model: the live model, which others change in place.
        evaluations: what was measured, by stage; all of the same data.
        load_dense: loads the dense model again; None where it is nowhere to be found.
        adapter: of a recovery that was not merged.
        control: adapter of the dense model that was trained alike.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.evaluations: dict[str, Evaluation] = {}
        self.load_dense: Callable[[], PreTrainedModel] | None = None
        self.adapter: Folder | None = None
        self.control: Folder | None = None
        self._dense: DenseSide | None = None
        self._pruned_by_others = False  # without a record, and known by the recovery of what was lost
        self._recovered = bool((getattr(model.config, "pruning_config", None) or {}).get("recovery"))
        self.accept()

    @property
    def is_pruned(self) -> bool:
        """Whether the model carries the record of a pruning."""
        return getattr(self.model.config, "pruning_config", None) is not None

    @property
    def now(self) -> str:
        """What the model is, in the words of `evaluations`: `"dense"`, `"pruned"` or `"recovered"`."""
        if self._recovered:
            return "recovered"
        return "pruned" if self.is_pruned or self._pruned_by_others else "dense"

    def accept(self) -> None:
        """Take the weights as they are now for what was measured, or will be."""
        self._seen = _state(self.model)

    def notice_changes(self) -> None:
        """Forget measurements of weights that were changed since, by training or by hand."""
        if _state(self.model) == self._seen:
            return
        self.accept()
        if self.now != "dense":
            forgotten = self.evaluations.pop(self.now, None)
        else:
            forgotten = self.evaluations.pop("dense", None) or self.load_dense
            self._dense = self.load_dense = None
        if forgotten is not None:
            logger.warning("The weights were changed by others: what was measured before does not count any more.")

    def set_adapter(self, adapter: Folder) -> None:
        """Note the adapter of an earlier recovery, found beside the weights."""
        self.adapter, self._recovered = adapter, True

    def was_pruned(self) -> None:
        """Note that the model was pruned: nothing of an earlier cut holds any more."""
        if self.adapter is not None:
            logger.warning("The adapter of the last recovery was never merged, does not fit any more, and is gone.")
        self.adapter, self.control, self._recovered = None, None, False
        self._forget("pruned", "recovered", "control")
        self.accept()

    def was_trained(
        self, adapter: Folder | None, load_dense: Callable[[], PreTrainedModel] | None, *, kept: bool
    ) -> None:
        """Note a recovery.

        Args:
            adapter: what it trained; None where that was merged.
            load_dense: what it took for the dense model.
            kept: whether it changed anything.
        """
        if self.now == "dense":
            self._pruned_by_others, self._dense = True, None  # what was taken for dense was not
            if "dense" in self.evaluations:
                self.evaluations["pruned"] = self.evaluations.pop("dense")
        if load_dense is not self.load_dense:
            self.load_dense, self._dense = load_dense, None
        if kept:
            if self.adapter is not None:
                logger.warning("The adapter of the recovery before is dropped: it belongs to the weights as they were.")
            self.adapter, self._recovered = adapter, True
        self.control = None
        self._forget("recovered", "control")
        self.accept()

    def compare_with(self, dense: DenseSide) -> None:
        """Take the measurements of a dense model that is no longer in memory; the model counts as pruned from it."""
        self._pruned_by_others = not self.is_pruned
        self._dense, self.load_dense = dense, None
        self.evaluations = {"dense": dense.evaluation}

    def measure(self, data: CalibrationData, *, batch_size: int, latency: bool) -> Evaluation:
        """Measure the model, the dense one where it was not measured on this data, and the control.

        A dense model that was measured before is not loaded: one model is in memory. One that is loaded for it lies
        beside the model.

        Args:
            data: what to measure on.
            batch_size: sequences a forward.
            latency: whether to time model and dense model in turn.

        Returns:
            The evaluation of the model; all of them are in `evaluations`, and nothing that was measured on other data.
        """
        name = self.now
        models = {name: self.model}
        if name != "dense" and (self._dense is None or not self._dense.is_of(data)):
            self._dense = None
            if self.load_dense is not None:
                models = {"dense": beside(self.load_dense(), self.model), name: self.model}
            else:
                logger.warning(
                    "The dense model was not measured on this data and cannot be loaded again, so there is no KL. Call "
                    "evaluate() on the same data before prune(). A saved model is compared by `optimum-cli prune "
                    "evaluate`%s.",
                    f" with --dense {base}" if (base := self._base_model) else ", which takes --dense MODEL",
                )
        measured = {}
        with adapted(self.model, self.adapter.name) if self.adapter else nullcontext():
            timed = measure_latency(models) if latency else {}
            for stage, model in models.items():
                if stage == "dense":
                    self._dense = DenseSide.of(model, data, batch_size=batch_size, timed=timed.get(stage))
                    measured[stage] = self._dense.evaluation
                else:
                    evaluation = evaluate_model(model, data, batch_size=batch_size, reference=self._reference)
                    measured[stage] = evaluation.timed(timed[stage]) if latency else evaluation
        if self.control is not None and self.load_dense is not None:
            control = models.get("dense") or beside(self.load_dense(), self.model)
            merge_adapter_(control, self.control.name)
            measured["control"] = evaluate_model(control, data, batch_size=batch_size, reference=self._reference)
        self._forget(*(stage for stage, found in self.evaluations.items() if not found.is_alike(measured[name])))
        self.evaluations |= measured
        return measured[name]

    @property
    def _reference(self) -> DenseReference | None:
        return self._dense and self._dense.reference

    @property
    def _base_model(self) -> str | None:
        """Hub id of the dense model, as the record names it."""
        return (getattr(self.model.config, "pruning_config", None) or {}).get("base_model")

    def _forget(self, *stages: str) -> None:
        for stage in stages:
            self.evaluations.pop(stage, None)


def _state(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Return what tells whether weights were replaced or changed in place: identity and version of each parameter."""
    return [(id(weight), 0 if weight.is_inference() else weight._version) for weight in model.parameters()]
