"""`Pruner`: load, prune, evaluate, save."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from optimum_prune import registry
from optimum_prune.calibration.data import load_samples
from optimum_prune.config import CalibrationConfig, PruningConfig
from optimum_prune.errors import CheckpointError, InvalidConfig, PruningError
from optimum_prune.evaluation import DenseReference, dense_reference, evaluate_model
from optimum_prune.integrations.card import inherited_metadata, model_card
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.latency import measure_latency
from optimum_prune.measurements import Evaluation, check_evaluation, comparison
from optimum_prune.pipeline import prune
from optimum_prune.report import PruningReport

logger = logging.getLogger(__name__)

_SHARED_KWARGS = {"revision", "token", "cache_dir", "local_files_only", "gguf_file", "subfolder", "force_download"}
"""Keywords of `from_pretrained` that say where the files are, and so hold for config and tokenizer too."""


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

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **kwargs: Any) -> "Pruner":
        """Load a model and its tokenizer.

        Args:
            name_or_path: a Hub id or a local directory.
            kwargs: for transformers' `from_pretrained`, e.g. `dtype`, `device_map`, `revision`, `gguf_file`.

        Raises:
            UnsupportedArchitecture: no adapter knows the model; found from the config, before weights are loaded.
            CheckpointError: it does not exist, or does not load.
        """
        shared = {key: kwargs[key] for key in _SHARED_KWARGS & kwargs.keys()}
        with _loading(name_or_path):
            registry.load("adapters", AutoConfig.from_pretrained(name_or_path, **shared).model_type)
            model = AutoModelForCausalLM.from_pretrained(name_or_path, **kwargs)
        try:
            tokenizer = AutoTokenizer.from_pretrained(name_or_path, **shared)
        except Exception as error:  # as in `_loading`
            logger.warning("%s has no tokenizer that loads (%s); calibration needs token ids.", name_or_path, error)
            tokenizer = None
        pruner = cls(model, tokenizer)
        if not pruner.is_pruned:
            pruner._reload_dense = lambda: AutoModelForCausalLM.from_pretrained(name_or_path, **kwargs)
        return pruner

    @property
    def is_pruned(self) -> bool:
        """Whether the model carries the record of a pruning, by this object or an earlier one."""
        return getattr(self.model.config, "pruning_config", None) is not None

    def prune(self, config: PruningConfig) -> PruningReport:
        """Prune `model` in place; see `prune`."""
        self.report = prune(self.model, config, self.tokenizer, self.processor)
        self.evaluations.pop("pruned", None)  # of an earlier cut
        return self.report

    def evaluate(self, dataset: Any, *, latency: bool = True, **options: Any) -> Evaluation:
        """Measure perplexity, KL to the dense model, size and latency of `model` as it is now.

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
        check_evaluation(dataset)
        config = CalibrationConfig(dataset, **options)
        data = load_samples(config, self.model, self.tokenizer, order="first")
        name = "pruned" if self.is_pruned else "dense"
        models = {name: self.model}
        if self.is_pruned and (self._reference is None or self._reference.data != data.fingerprint):
            self._reference = None
            self.evaluations.pop("dense", None)
            if self._reload_dense is not None:
                models = {"dense": self._reload_dense(), name: self.model}
            else:
                logger.warning(
                    "The dense model was not measured on this data and cannot be loaded again, so there is no KL. Call "
                    "evaluate() on the same data before prune(), or start from Pruner.from_pretrained()."
                )
        timed = measure_latency(models) if latency else {}
        for name, model in models.items():
            if name == "dense":
                self._reference = dense_reference(model, data, batch_size=config.batch_size)
            reference = self._reference if name == "pruned" else None
            evaluation = evaluate_model(model, data, batch_size=config.batch_size, reference=reference)
            self.evaluations[name] = evaluation.timed(timed[name]) if latency else evaluation
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
        verify: bool = True,
        card_data: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """Write model, tokenizer, report and a measured model card, whole or not at all.

        Args:
            directory: an old checkpoint there is replaced in one step; other files there stay.
            layout: `"auto"` (plain transformers loads it where that is possible), `"stock"` or `"compact"`.
            verify: check that what was written will load, and fail here instead of later.
            card_data: metadata of the model card that is known better than what can be found, e.g. `base_model`,
                `license`, `language`.
            kwargs: for transformers' `save_pretrained`, e.g. `max_shard_size`.

        Returns:
            The layout written.

        Raises:
            InvalidConfig: the layout cannot hold this model.
            CheckpointError: it cannot be written there, or would not load again.
        """

        def companions(folder: Path, layout: str, weight_bytes: int) -> None:
            for companion in filter(None, (self.tokenizer, self.processor)):
                companion.save_pretrained(folder)
            if self.report is not None:
                self.report.save(folder / "pruning_report.json")
                card = model_card(
                    self.report,
                    evaluations=self.evaluations,
                    layout=layout,
                    file_bytes=weight_bytes,
                    card_data=inherited_metadata(self.report.base_model) | (card_data or {}),
                )
                card.save(folder / "README.md")

        return save_checkpoint(self.model, directory, layout=layout, verify=verify, companions=companions, **kwargs)


@contextmanager
def _loading(name_or_path: str | Path) -> Iterator[None]:
    """Turn what transformers raises for a model that is not there, or is damaged, into one clear error."""
    if Path(name_or_path).is_absolute() and not Path(name_or_path).exists():
        # transformers would call it a malformed Hub id
        raise CheckpointError(f"{name_or_path} does not exist.")
    try:
        yield
    except PruningError:
        raise
    except Exception as error:  # a damaged file or a wrong keyword ends in any exception of several libraries
        reason = " ".join(str(error).split())
        if not isinstance(error, OSError | ValueError | RuntimeError):  # the text may be no more than a key
            reason = f"{type(error).__name__}: {reason}"
        raise CheckpointError(f"{name_or_path} cannot be loaded: {reason}") from error
