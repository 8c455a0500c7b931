"""`Pruner`: load, compare, prune, evaluate, save."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from optimum_prune.calibration.data import load_samples
from optimum_prune.comparing.results import Comparison
from optimum_prune.comparing.running import compare
from optimum_prune.config import CalibrationConfig, PruningConfig
from optimum_prune.errors import InvalidConfig
from optimum_prune.evaluation import DenseReference, dense_reference, evaluate_model
from optimum_prune.integrations.card import inherited_metadata, model_card
from optimum_prune.integrations.layouts import Written, save_checkpoint
from optimum_prune.integrations.loading import load_companions, load_model, read_report, same_record, write_report
from optimum_prune.latency import measure_latency
from optimum_prune.measurements import Evaluation, check_evaluation, comparison
from optimum_prune.pipeline import prune
from optimum_prune.planning.plan import Plan
from optimum_prune.planning.planner import make_plan
from optimum_prune.report import PruningReport
from optimum_prune.sparsity import masks_of

logger = logging.getLogger(__name__)


class Pruner:
    """Prune, evaluate and save one model.

    Attributes:
        model: the live model; `prune` changes it in place.
        tokenizer: used for calibration and evaluation text, and saved along.
        processor: of a multimodal model, saved along.
        report: of the last `prune`, or None.
        evaluations: what `evaluate` measured: `"dense"` and `"pruned"`.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, processor: Any = None):
        self.model = model
        self.tokenizer: Any = tokenizer or getattr(processor, "tokenizer", None)
        self.processor = processor
        self.report: PruningReport | None = None
        self.evaluations: dict[str, Evaluation] = {}
        self._reference: DenseReference | None = None
        self._reload_dense: Callable[[], PreTrainedModel] | None = None
        self._source: Path | None = None  # the local directory that the model was loaded from
        self._seen = _state(model)

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **kwargs: Any) -> "Pruner":
        """Load a model and its tokenizer, or its processor where it reads images.

        Args:
            name_or_path: a Hub id or a local directory.
            kwargs: for transformers' `from_pretrained`, e.g. `dtype`, `device_map`, `revision`, `gguf_file`.

        Raises:
            UnsupportedArchitecture: no adapter knows the model; found from the config, before weights are loaded.
            CheckpointError: it does not exist, or does not load.
        """
        source = Path(name_or_path).resolve() if Path(name_or_path).exists() else None
        # Absolute: after a change of directory, a relative path would look like a Hub id.
        name_or_path = str(source or name_or_path)
        model = load_model(name_or_path, **kwargs)
        pruner = cls(model, *load_companions(model, name_or_path, **kwargs))
        pruner._source = source
        if not pruner.is_pruned:
            pruner._reload_dense = lambda: load_model(name_or_path, **kwargs)
        elif source is not None:
            pruner.report, pruner.evaluations = read_report(source, model.config.pruning_config)
        return pruner

    @property
    def is_pruned(self) -> bool:
        """Whether the model carries the record of a pruning, by this object or an earlier one."""
        return getattr(self.model.config, "pruning_config", None) is not None

    def plan(self, config: PruningConfig, tensor_parallel: int = 1) -> Plan:
        """Say what `prune(config)` will keep and save, and refuse what it would refuse; changes nothing.

        Args:
            config: as for `prune`.
            tensor_parallel: devices among which heads and MLP channels are to be divided.
        """
        return make_plan(self.model, config, tensor_parallel, tokenizer=self.tokenizer, processor=self.processor)

    def compare(
        self,
        settings: Sequence[PruningConfig] | Mapping[str, PruningConfig],
        dataset: Any,
        sparsities: Sequence[float] | None = None,
        directory: str | Path | None = None,
        **options: Any,
    ) -> Comparison:
        """Try several settings on one draw of calibration data, and measure each; `model` is left as it was.

        Args:
            settings: by name; or a sequence, whose names are made from what differs.
            dataset: what to measure on; any source of `CalibrationConfig`, its first samples are used.
            sparsities: every setting is tried at each of them; None: each at its own.
            directory: where to write `comparison.json` (after every row), `comparison.md` and `comparison.png`; needs
                matplotlib.
            options: other fields of `CalibrationConfig` for `dataset`, e.g. `num_samples`, `seq_len`, `batch_size`.

        Raises:
            PruningError: one of its kinds, before the first run; the setting is named.
        """
        evaluation = CalibrationConfig(dataset, **options)
        companions = {"tokenizer": self.tokenizer, "processor": self.processor}
        self._notice_changes()
        try:
            return compare(self.model, settings, evaluation, sparsities, directory, **companions)
        finally:
            self._seen = _state(self.model)  # the weights were written to, and put back

    def prune(self, config: PruningConfig) -> PruningReport:
        """Prune `model` in place; see `prune`."""
        self._notice_changes()
        self.report = prune(self.model, config, self.tokenizer, self.processor)
        self.evaluations.pop("pruned", None)  # of an earlier cut
        self._seen = _state(self.model)
        return self.report

    def masks(self) -> dict[str, Tensor]:
        """Read the masks of `model` off its zeros; see `masks_of`."""
        return masks_of(self.model)

    def evaluate(self, dataset: Any, *, latency: bool = True, **options: Any) -> Evaluation:
        """Measure perplexity, accuracy, KL to the dense model, size and latency of `model` as it is now.

        Before pruning this measures the dense model. After pruning the dense model is measured first, if it was not
        measured on the same data and can be loaded again (it can after `from_pretrained`); both are then timed in turn.
        Without a dense model there is no KL, and a warning says so.

        Args:
            dataset: any source of `CalibrationConfig`; its first samples are used.
            latency: whether to time prefill and decoding.
            options: other fields of `CalibrationConfig`, e.g. `num_samples`, `seq_len`, `batch_size`, `split`.

        Returns:
            The evaluation of `model`, also kept in `evaluations` under `"dense"` or `"pruned"`.
        """
        config = CalibrationConfig(dataset, **options)
        check_evaluation(config.source, config.selection)
        if not self.model.can_generate():
            raise InvalidConfig(f"Only language models can be evaluated, and {type(self.model).__name__} is none.")
        self._notice_changes()
        data = load_samples(config, self.model, self.tokenizer, processor=self.processor, order="first")
        name = "pruned" if self.is_pruned else "dense"
        models = {name: self.model}
        if self.is_pruned and (self._reference is None or self._reference.data != data.fingerprint):
            self._reference = None
            if self._reload_dense is not None:
                models = {"dense": self._reload_dense(), name: self.model}
            else:
                logger.warning(
                    "The dense model was not measured on this data and cannot be loaded again, so there is no KL. Call "
                    "evaluate() on the same data before prune(), or start from Pruner.from_pretrained()."
                )
        timed = measure_latency(models) if latency else {}
        measured = {}
        for name, model in models.items():
            if name == "dense":
                self._reference = dense_reference(model, data, batch_size=config.batch_size)
            reference = self._reference if name == "pruned" else None
            evaluation = evaluate_model(model, data, batch_size=config.batch_size, reference=reference)
            measured[name] = evaluation.timed(timed[name]) if latency else evaluation
        if "dense" not in measured and self._reference is None:
            self.evaluations.pop("dense", None)  # of other data
        self.evaluations |= measured
        return self.evaluations[name]

    def comparison(self) -> str:
        """Lay out what `evaluate` measured, as a table: dense beside pruned, with ratios."""
        if "pruned" not in self.evaluations:
            raise InvalidConfig("Nothing to compare yet: call prune(), then evaluate().")
        return comparison(self.evaluations.get("dense"), self.evaluations["pruned"])

    def save_pretrained(
        self,
        directory: str | Path,
        layout: str = "auto",
        *,
        storage: str = "dense",
        verify: bool = True,
        card_data: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """Write model, tokenizer, report and a measured model card, whole or not at all.

        Args:
            directory: an old checkpoint there is replaced in one step; other files there stay.
            layout: `"auto"` (plain transformers loads it where that is possible), `"stock"` or `"compact"`.
            storage: `"dense"`, or `"packed"`: zeros take one bit each on disk, and loading needs this package; loaded,
                the model is dense again.
            verify: check that what was written will load, and fail here instead of later.
            card_data: metadata of the model card that is known better than what can be found, e.g. `base_model`,
                `license`, `language`.
            kwargs: for transformers' `save_pretrained`, e.g. `max_shard_size`.

        Returns:
            The layout written.

        Raises:
            InvalidConfig: an unknown layout or storage, or the layout cannot hold this model.
            CheckpointError: it cannot be written there, or would not load again.
        """

        def companions(folder: Path, written: Written) -> None:
            for companion in filter(None, (self.tokenizer, self.processor)):
                companion.save_pretrained(folder)
            if self.report is not None:
                write_report(folder, self.report, self.evaluations)
                card = model_card(
                    self.report,
                    evaluations=self.evaluations,
                    layout=written.layout,
                    storage=written.storage,
                    architecture=type(self.model).__name__,
                    reads_images=self.processor is not None,
                    file_bytes=written.weight_bytes,
                    card_data=inherited_metadata(self.report.base_model) | (card_data or {}),
                )
                card.save(folder / "README.md")

        self._notice_changes()
        record = getattr(self.model.config, "pruning_config", None)
        if self.report is not None and not same_record(self.report, record or {}):
            raise InvalidConfig(
                "The model was pruned again without this Pruner, whose report and card would be false. Use "
                "Pruner.prune(), or save with model.save_pretrained()."
            )
        options = {"layout": layout, "storage": storage, "verify": verify, "companions": companions}
        layout = save_checkpoint(self.model, directory, **options, **kwargs)
        if self._source == Path(directory).resolve():
            self._reload_dense = None  # the dense model is no longer there
        return layout

    def _notice_changes(self) -> None:
        """Forget measurements of weights that were changed since, by training or by hand."""
        if _state(self.model) == self._seen:
            return
        self._seen = _state(self.model)
        if self.is_pruned:
            forgotten = self.evaluations.pop("pruned", None)
        else:
            forgotten = self.evaluations.pop("dense", None) or self._reload_dense
            self._reference = self._reload_dense = None
        if forgotten is not None:
            logger.warning("The weights were changed by others: what was measured before does not count any more.")


def _state(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Return what tells whether weights were replaced or changed in place: identity and version of each parameter."""
    return [(id(weight), 0 if weight.is_inference() else weight._version) for weight in model.parameters()]
