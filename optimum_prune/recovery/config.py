"""How a pruned model is trained, and on what: checked, versioned, the same in Python, recipes and the shell."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optimum_prune import checks
from optimum_prune.config import CalibrationConfig, check_columns, describe_source
from optimum_prune.errors import InvalidConfig
from optimum_prune.options import Config, option

LOSSES = ("lm", "kl", "mix")
MERGING = ("masked", "remask", "plain")
MERGES = (*MERGING, "none")
SCHEDULES = ("constant", "linear", "cosine")


def _dataset(name: str, value: Any) -> Any:
    """Accept a source of `CalibrationConfig`, or a mapping of sources to the shares that they have."""
    if not isinstance(value, Mapping) or hasattr(value, "column_names"):
        return checks.source(name, value)
    if not value or not all(isinstance(source, str) and source for source in value):
        raise checks.refuse(name, "a source, or a non-empty mapping of sources to their shares", value)
    share = checks.number(0)
    return {source: share(f"{name}[{source!r}]", part) for source, part in value.items()}


def _columns(name: str) -> dict[str, Any]:
    declared = CalibrationConfig.__dataclass_fields__[name]
    return {"default": declared.default, "check": declared.metadata["check"], "help": declared.metadata["help"]}


@dataclass(frozen=True, repr=False)
class RecoveryConfig(Config):
    """How a pruned model learns back what it lost: LoRA (Hu et al., arXiv 2106.09685) through PEFT."""

    dataset: Any = option(
        None,
        _dataset,
        "dataset id, local file or folder, or 'self', as for calibration; in Python and recipes also a mapping of such "
        "sources to their shares. By default half text that the dense model writes itself, half the calibration source",
    )
    max_steps: int = option(200, checks.integer(1), "steps of the optimizer")
    batch_size: int = option(4, checks.integer(1), "sequences per forward pass of each process")
    gradient_accumulation: int = option(1, checks.integer(1), "forward passes per step of the optimizer")
    seq_len: int | None = option(None, checks.integer(1), "tokens per sequence; by default min(512, the model's limit)")
    num_samples: int | None = option(
        None, checks.integer(1), "sequences to train on; by default as many as the steps need"
    )
    split: str = option(**_columns("split"))
    text_column: str | None = option(**_columns("text_column"))
    target_column: str | None = option(
        None, checks.text, "column that holds the answer to the text: the loss is that of the answers alone"
    )
    image_column: str | None = option(**_columns("image_column"))
    loss: str = option(
        "lm",
        checks.one_of("loss", lambda: LOSSES),
        "'lm' (cross-entropy of the next token), 'kl' (distance to what the dense model predicts) or 'mix' of both",
    )
    kl_weight: float = option(0.5, checks.number(0, below=1), "share of the KL in loss 'mix'")
    teacher_top_k: int | None = option(
        None,
        checks.integer(1),
        "keep so many of the dense model's logits for each token, taken once before training; by default the dense "
        "model stays in memory and runs along",
    )
    teacher_device: str | None = option(
        None, checks.text, "where the dense model runs, e.g. 'cpu' or 'cuda:1'; by default where the pruned one does"
    )
    learning_rate: float = option(5e-4, checks.number(0), "of AdamW, at its highest")
    warmup: float = option(0.05, checks.number(0, below=1, or_equal=True), "fraction of the steps that it rises")
    schedule: str = option("cosine", checks.one_of("schedule", lambda: SCHEDULES), "how it falls after that")
    rank: int = option(8, checks.integer(1), "of the update of each linear")
    alpha: float = option(16.0, checks.number(0), "updates are scaled by alpha / rank")
    dropout: float = option(0.0, checks.number(0, below=1, or_equal=True), "of what the updates read")
    target_modules: list[str] | None = option(
        None,
        checks.list_of("glob patterns", checks.text),
        "glob patterns of the linears to train; by default all that can be pruned",
    )
    merge: str = option(
        "masked",
        checks.one_of("merge", lambda: MERGES),
        "what happens to zeros: 'masked' (updates are masked in training, so that nothing changes at the merge), "
        "'remask' (set to zero again after it), 'plain' (they are lost) or 'none' (the adapter stays apart)",
    )
    held_out: float = option(
        0.1,
        checks.number(0, below=1),
        "fraction of the sequences that are not trained on, by which the best step is kept",
    )
    evaluations: int = option(10, checks.integer(1), "how often the loss on held-out sequences is taken")
    patience: int | None = option(
        None, checks.integer(1), "stop after so many evaluations that were no better than the best; by default never"
    )
    gradient_checkpointing: bool = option(
        False, checks.boolean, "compute activations again in the backward pass: less memory, more time"
    )
    trainer_options: dict[str, Any] | None = option(
        None,
        checks.options,
        "other fields of transformers' TrainingArguments, e.g. bf16=true logging_steps=10 report_to=tensorboard",
    )
    # a Trainer seeds NumPy too, whose seeds end there
    seed: int = option(
        0, checks.integer(0, below=2**32), "seed of the draw of sequences, their order, and the first adapter"
    )

    def __post_init__(self) -> None:
        """Check every field, then those that constrain each other."""
        super().__post_init__()
        check_columns(self.text_column, self.target_column)
        if self.loss == "lm":
            for name in ("teacher_top_k", "teacher_device"):
                if getattr(self, name) is not None:
                    raise InvalidConfig(
                        f"{name} has no meaning with loss 'lm', which asks no teacher. Use 'kl' or 'mix'."
                    )

    @property
    def uses_teacher(self) -> bool:
        """Whether the dense model is asked."""
        return self.loss != "lm"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; data held in memory is described, never copied."""
        in_memory = self.dataset is not None and not isinstance(self.dataset, Mapping)
        return super().to_dict() | ({"dataset": describe_source(self.dataset)} if in_memory else {})
