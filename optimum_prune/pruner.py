"""`Pruner`: load, compare, prune, evaluate, save."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from optimum_prune.calibration.data import load_samples
from optimum_prune.comparing.results import Comparison
from optimum_prune.comparing.running import compare
from optimum_prune.config import CalibrationConfig, PruningConfig
from optimum_prune.configs import own_configs_
from optimum_prune.context import context, seen_by
from optimum_prune.errors import InvalidConfig
from optimum_prune.fetching import HUB_KWARGS
from optimum_prune.integrations.at_load import report_at_load
from optimum_prune.integrations.beside import Origin
from optimum_prune.integrations.companions import Companions
from optimum_prune.integrations.hub import Destination, prepare, save_and_upload
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.integrations.loading import load_companions, load_model, load_skeleton, same_record
from optimum_prune.integrations.metadata import given_metadata
from optimum_prune.integrations.reading import copy_adapter, find_report
from optimum_prune.integrations.unpadding import is_padded, unpad_
from optimum_prune.measurements import Evaluation, check_evaluation, comparison
from optimum_prune.pipeline import prune
from optimum_prune.planning.plan import Plan
from optimum_prune.planning.planner import make_plan
from optimum_prune.recovery.config import RecoveryConfig
from optimum_prune.recovery.report import RecoveryReport
from optimum_prune.recovery.teacher import beside
from optimum_prune.report import PruningReport
from optimum_prune.sparsity import masks_of
from optimum_prune.stages import DenseSide, Stages
from optimum_prune.wrapping import check_language_model, check_unwrapped


class Pruner:
    """Prune, evaluate and save one model.

    Attributes:
        tokenizer: used for calibration and evaluation text, and saved along.
        processor: of a multimodal model, saved along.
        report: of the last `prune`, or of the pruning while loading, or None.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, processor: Any = None):
        check_unwrapped(model)
        self.tokenizer: Any = tokenizer or getattr(processor, "tokenizer", None)
        self.processor = processor
        self.report = report_at_load(model)
        self._stages = Stages(model)
        self._origin = Origin.of(model)
        self._trusts_code = False  # whether Python code that comes with a model may run

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **kwargs: Any) -> "Pruner":
        """Load a model and its tokenizer, or its processor where it reads images.

        Args:
            name_or_path: a Hub id or a local directory.
            kwargs: for transformers' `from_pretrained`, e.g. `dtype`, `device_map`, `revision`, `gguf_file`.
                `trust_remote_code=True` runs Python code that comes with the model, its tokenizer or its processor
                (of `code_revision`); without it such code never runs, and nobody is asked.

        Raises:
            UnsupportedArchitecture: no adapter knows the model; found from the config, before weights are loaded.
            CheckpointError: it does not exist, or does not load; or its tokenizer or processor is code of its own, and
                `trust_remote_code=True` was not given.
        """
        source = Path(name_or_path).resolve() if Path(name_or_path).exists() else None
        # Absolute: after a change of directory, a relative path would look like a Hub id.
        name_or_path = str(source or name_or_path)
        model = load_model(name_or_path, **kwargs)
        pruner = cls(model, *load_companions(model, name_or_path, **kwargs))
        where = {key: kwargs[key] for key in HUB_KWARGS & kwargs.keys()}
        pruner._origin = replace(Origin.of(model, **where), name_or_path=name_or_path)
        pruner._trusts_code = bool(kwargs.get("trust_remote_code"))
        if not pruner.is_pruned:
            pruner._stages.load_dense = lambda: load_model(name_or_path, **kwargs)
            return pruner
        if pruner.report is None:
            pruner.report, pruner.evaluations = find_report(name_or_path, model.config.pruning_config, **where)
        apart = pruner.report is not None and any(found.is_apart for found in pruner.report.recovery)
        if (apart or source is not None) and (adapter := copy_adapter(name_or_path, **where)):
            pruner._stages.set_adapter(adapter)
        return pruner

    @property
    def model(self) -> PreTrainedModel:
        """The live model; `prune` and `recover` change it in place."""
        return self._stages.model

    @model.setter
    def model(self, model: PreTrainedModel) -> None:
        self._stages.model = model

    @property
    def evaluations(self) -> dict[str, Evaluation]:
        """What `evaluate` measured, by `"dense"`, `"pruned"`, `"recovered"` and `"control"`."""
        return self._stages.evaluations

    @evaluations.setter
    def evaluations(self, evaluations: dict[str, Evaluation]) -> None:
        self._stages.evaluations = evaluations

    @property
    def is_pruned(self) -> bool:
        """Whether the model carries the record of a pruning, by this object or an earlier one."""
        return self._stages.is_pruned

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
        self._stages.notice_changes()
        try:
            return compare(self.model, settings, evaluation, sparsities, directory, **companions)
        finally:
            self._stages.accept()  # the weights were written to, and put back

    def prune(self, config: PruningConfig) -> PruningReport:
        """Prune `model` in place; see `prune`."""
        self._stages.notice_changes()
        self.report = prune(self.model, config, self.tokenizer, self.processor)
        self._stages.was_pruned()
        return self.report

    def recover(
        self,
        config: RecoveryConfig | None = None,
        *,
        control: bool = False,
        dense: str | Path | None = None,
        directory: str | Path | None = None,
    ) -> RecoveryReport:
        """Train LoRA adapters on `model` and merge them; see `optimum_prune.recovery.recover.recover`.

        Args:
            config: on what, and how.
            control: train the dense model alike too. What training alone gives a model that lost nothing is not
                recovered, and only this tells how much it is.
            dense: the dense model, a Hub id or a local directory, where this Pruner was not loaded from it, or the
                model was pruned by other means. Its own Python code runs where this Pruner was loaded with
                `trust_remote_code=True`.
            directory: where checkpoints go, to resume from after a break.

        Raises:
            PruningError: one of its kinds; says what to do.
        """
        from optimum_prune.recovery.recover import recover  # here, because it brings the Trainer

        config = RecoveryConfig() if config is None else config
        RecoveryConfig.check_type(config)
        self._stages.notice_changes()
        load_dense = self._dense_loader(dense)
        if control and load_dense is None:
            raise InvalidConfig(
                "control=True trains the dense model alike, and it cannot be loaded again. Name it (dense=), or leave "
                "control out."
            )
        if control and config.loss == "kl":
            raise InvalidConfig(
                "control=True with loss='kl' would train the dense model to be what it is. Use loss 'mix' or 'lm', or "
                "leave control out."
            )
        if config.merge in ("plain", "none") and is_padded(self.model):
            raise InvalidConfig(
                f"merge={config.merge!r} would fill the padding of the model. Cut it first, by unpad(), or use "
                "merge='masked'."
            )
        options: dict[str, Any] = {"tokenizer": self.tokenizer, "processor": self.processor, "dense": load_dense}
        if self.report is not None and self.report.calibration is not None:
            options["calibration"] = self.report.config["calibration"]["source"]
        adapter = TemporaryDirectory(prefix="optimum-prune-") if config.merge == "none" else None
        report = recover(self.model, config, **options, directory=directory, adapter=adapter and adapter.name)
        self._stages.was_trained(adapter, load_dense, kept=report.kept)
        self._note(report)
        if control and load_dense is not None:
            folder = TemporaryDirectory(prefix="optimum-prune-")
            options |= {"directory": directory and Path(directory) / "control", "adapter": folder.name}
            twin = beside(load_dense(), self.model)
            report.control = recover(twin, replace(config, merge="none"), **options)
            self._stages.control = folder if report.control.kept else None
            self._record()
        return report

    def _dense_loader(self, named: str | Path | None) -> Callable[[], PreTrainedModel] | None:
        """Return what loads the dense model: a model without a record may have been pruned by other means."""
        if named is None:
            return None if self._stages.now == "dense" else self._stages.load_dense
        name_or_path = str(Path(named).resolve() if Path(named).exists() else named)
        trust = {"trust_remote_code": self._trusts_code}
        load_skeleton(name_or_path, **trust)  # refuse now what does not load later
        return lambda: load_model(name_or_path, **trust)

    def _note(self, report: RecoveryReport) -> None:
        """Take a recovery into the report of the pruning."""
        if self.report is None:
            return
        if report.kept:  # it was trained on the weights alone, without the adapter of an earlier one
            self.report.recovery = [found for found in self.report.recovery if not found.is_apart]
        self.report.recovery.append(report)
        self._record()

    def _record(self) -> None:
        """Write down in the config what the report says by now."""
        if self.report is not None:
            own_configs_(self.model)
            self.model.config.pruning_config |= self.report.record()

    def masks(self) -> dict[str, Tensor]:
        """Read the masks of `model` off its zeros; see `masks_of`."""
        return masks_of(self.model)

    def evaluate(self, dataset: Any, *, latency: bool = True, **options: Any) -> Evaluation:
        """Measure perplexity, accuracy, KL to the dense model, size and latency of `model` as it is now.

        Before pruning this measures the dense model, and keeps of it what the KL takes: one model is in memory then
        and later. After pruning the dense model is measured too, if it was not measured on the same data and can be
        loaded again (it can after `from_pretrained`); both models are in memory then, and are timed in turn. Without a
        dense model there is no KL, and a warning says so. So it does where the data is, or holds text of, the data
        that the model was calibrated or trained on.

        Args:
            dataset: any source of `CalibrationConfig`; its first samples are used.
            latency: whether to time prefill and decoding. Models that were not timed in turn have the time between
                their measurements stated in the table and on the card.
            options: other fields of `CalibrationConfig`, e.g. `num_samples`, `seq_len`, `batch_size`, `split`.

        Returns:
            The evaluation of `model`, also kept in `evaluations` under `"dense"`, `"pruned"` or `"recovered"`. After
            `recover(control=True)` the dense model that was trained alike is measured too, as `"control"`.
        """
        config = CalibrationConfig(dataset, **options)
        check_evaluation(config.source, config.selection)
        check_language_model(self.model, "evaluated")
        self._stages.notice_changes()
        data = load_samples(config, self.model, self.tokenizer, processor=self.processor, order="first")
        data.check_predicts()
        found = self._stages.measure(data, batch_size=config.batch_size, latency=latency)
        found = replace(found, context=context(seen_by(self.report), data))
        self.evaluations[self._stages.now] = found
        return found

    def compare_with(self, dense: DenseSide) -> None:
        """Compare later evaluations with a dense model that was measured before; see `evaluate_checkpoint`."""
        self._stages.compare_with(dense)

    def comparison(self) -> str:
        """Lay out what `evaluate` measured, as a table: dense beside pruned, with ratios."""
        if not self.evaluations.keys() & {"pruned", "recovered"}:
            raise InvalidConfig("Nothing to compare yet: call prune(), then evaluate().")
        return comparison(self.evaluations)

    def save_pretrained(
        self,
        directory: str | Path,
        layout: str = "auto",
        *,
        storage: str = "dense",
        class_switch: bool = False,
        verify: bool = True,
        base_model: str | None = None,
        license: str | None = None,
        card_data: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """Write model, tokenizer, report and a measured model card, whole or not at all.

        Small files beside the weights that the model was loaded from (licences, tokenizer files, code, pictures) go
        along; a warning and the card name those that do not, with the reason.

        Of processes that train together the main one writes, and the others do not wait for it.

        The adapter of a recovery that was not merged goes into the folder `adapter`, as PEFT writes it:
        `PeftModel.from_pretrained(model, directory, subfolder="adapter")` puts it on.

        Args:
            directory: an old checkpoint there is replaced in one step; other files there stay. A `README.md` that this
                package did not write, or that somebody edited, is kept as `README.before-pruning.md`.
            layout: `"auto"` (plain transformers loads it where that is possible), `"stock"`, `"compact"` (layers may
                differ in size, and loading needs this package) or `"padded"` (as compact, with zeros up to the size of
                the widest layer: larger, and plain transformers loads it).
            storage: `"dense"`, or `"packed"`: zeros take one bit each on disk, and loading needs this package; loaded,
                the model is dense again.
            class_switch: where Llama's config refuses the number of heads, `"auto"` and `"stock"` may write the Mistral
                that computes the same; `model` stays what it is.
            verify: check that what was written will load, and fail here instead of later.
            base_model: Hub id of the dense model, for card and report; needed where it was loaded from a folder.
            license: the Hub's identifier of the licence, for the card, e.g. `"apache-2.0"`; by default that of the card
                of the model's source.
            card_data: other metadata of the card that is known better than what can be found, e.g. `language`.
            kwargs: for transformers' `save_pretrained`, e.g. `max_shard_size`.

        Returns:
            The layout written.

        Raises:
            InvalidConfig: an unknown layout, storage or licence, or the layout cannot hold this model.
            CheckpointError: it cannot be written there, or would not load again.
        """
        given = given_metadata(base_model, license)
        if given and self.report is None:
            raise InvalidConfig(
                f"{' and '.join(given)} cannot be noted: without a report of the pruning no card is written."
            )
        self._stages.notice_changes()
        record = getattr(self.model.config, "pruning_config", None)
        if self.report is not None and not same_record(self.report, record or {}):
            raise InvalidConfig(
                "The model was pruned again without this Pruner, whose report and card would be false. Use "
                "Pruner.prune(), or save with model.save_pretrained()."
            )
        if base_model is not None and self.report is not None:
            self.report.name_base(base_model)
            self._record()
        options = {"layout": layout, "storage": storage, "class_switch": class_switch, "verify": verify}
        companions = Companions(
            target=Path(directory),
            origin=self._origin,
            tokenizer=self.tokenizer,
            processor=self.processor,
            adapter=self._stages.adapter and self._stages.adapter.name,
            report=self.report,
            evaluations=self.evaluations,
            card_data=dict(card_data or {}) | given,
        )
        layout = save_checkpoint(self.model, directory, companions=companions.write, **options, **kwargs)
        if self._origin.folder is not None and self._origin.folder.resolve() == Path(directory).resolve():
            self._stages.load_dense = None  # the dense model is no longer there
        return layout

    def push_to_hub(
        self,
        repo_id: str,
        *,
        directory: str | Path | None = None,
        private: bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        commit_message: str | None = None,
        token: str | None = None,
        base_model: str | None = None,
        license: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Save the model, and upload all of it in one commit, in place of an older checkpoint.

        The repository is created, and the right to write there tried, before anything is saved. If the upload fails,
        what was saved stays, and the error says where and how to try again.

        Args:
            repo_id: `user/name`, or `name` for a repository of one's own.
            directory: where to save, and keep, the checkpoint; by default a temporary one. What is saved already is
                uploaded by `optimum-cli prune push`.
            private: whether only its owners see a new repository; by default what their settings say.
            revision: branch to write to, created where it does not exist; by default `main`.
            create_pr: propose the files by a pull request.
            commit_message: first line of the commit, and title of the pull request.
            token: by default that of `hf auth login` or `HF_TOKEN`.
            base_model: as for `save_pretrained`.
            license: likewise.
            kwargs: others for `save_pretrained`.

        Returns:
            The address of the repository, branch or pull request.

        Raises:
            InvalidConfig: an impossible destination, or as `save_pretrained`.
            CheckpointError: as `save_pretrained`.
            PublishError: the Hub refused, or did not answer.
        """
        given = given_metadata(base_model, license)  # refused before a repository is made
        to = prepare(Destination(repo_id, private, revision, create_pr, commit_message, token))
        return save_and_upload(lambda folder: self.save_pretrained(folder, **kwargs, **given), to, directory)

    def unpad(self) -> None:
        """Cut the padding of a model that was loaded from a padded checkpoint, in place: it computes the same."""
        self._stages.notice_changes()
        unpad_(self.model)
        self._stages.accept()  # what was measured still holds
