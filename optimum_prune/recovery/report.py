"""What a recovery was asked for and what it gave: pure data, the same in JSON, printable as a table."""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from optimum_prune.config import describe_origin, without_paths

VERSION = 1


@dataclass(frozen=True)
class Losses:
    """Mean losses of a predicted token on the held-out sequences, in nats.

    Attributes:
        lm: cross-entropy.
        kl: `KL(dense || this)`; None where no dense model was asked.
    """

    lm: float
    kl: float | None = None


@dataclass
class RecoveryReport:
    """What was trained, on what, and what the held-out sequences say of it; `str()` is a table.

    Attributes:
        config: `RecoveryConfig.to_dict()`.
        data: `TrainingData.to_dict()`.
        before: losses of the pruned model.
        after: losses with the adapter that was kept; where none was, those before.
        merged: losses after the merge; None where the adapter stays apart.
        kept: whether the adapter was better than none; if not, the model is as it was.
        steps: steps trained.
        best_step: the step whose adapter was kept.
        curve: rows `{"step", "train"}` and `{"step", "held_out"}`: the trained loss, in nats per predicted token, where
            it was finite.
        trained_parameters: parameters of the adapter.
        zeros_before: zeros that pruning had made; those by chance do not count.
        zeros_after: the same, after the merge.
        seconds: of the whole run.
        machine: where it was trained, in general words.
        control: the same training of the dense model; None where it was not run.
        warnings: whatever the user should know, a sentence each.
    """

    config: dict[str, Any]
    data: dict[str, Any]
    before: Losses
    after: Losses
    merged: Losses | None
    kept: bool
    steps: int
    best_step: int
    curve: list[dict[str, float]]
    trained_parameters: int
    zeros_before: int
    zeros_after: int
    seconds: float
    machine: str
    control: "RecoveryReport | None" = None
    warnings: list[str] = field(default_factory=list)

    @property
    def kl_label(self) -> str:
        """What `Losses.kl` is; of the teacher's best tokens alone it is less than that of all."""
        k = self.config.get("teacher_top_k")
        return "KL to the dense model" + (f" (its {k} best tokens)" if k else "")

    @property
    def is_apart(self) -> bool:
        """Whether what was trained is an adapter beside the weights."""
        return self.kept and self.merged is None

    @property
    def adapted(self) -> Losses | None:
        """Losses with the adapter; None where none was kept."""
        return self.after if self.kept else None

    @property
    def losses(self) -> list[tuple[str, Losses]]:
        """What was measured on held-out sequences, in words."""
        rows = [("pruned", self.before), ("with the adapter", self.adapted), ("merged", self.merged)]
        if self.control is not None:
            rows += [("dense", self.control.before), ("dense, trained alike", self.control.after)]
        return [(label, losses) for label, losses in rows if losses is not None]

    @property
    def merge_gap(self) -> float | None:
        """By how much the merge changed the loss, in nats; None without a merge."""
        return None if self.merged is None else self.merged.lm - self.after.lm

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"version": VERSION} | asdict(self) | {"control": self.control and self.control.to_dict()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RecoveryReport":
        """Read what `to_dict` returned."""
        values: dict[str, Any] = {option.name: data[option.name] for option in fields(cls)}
        for name in ("before", "after", "merged"):
            values[name] = values[name] and Losses(**values[name])
        values["control"] = values["control"] and cls.from_dict(values["control"])
        return cls(**values)

    def record(self) -> dict[str, Any]:
        """Return the short form that is kept in `config.json`."""
        final = self.merged or self.after
        return {
            "config": without_paths(self.config),
            "data": without_paths({name: value for name, value in self.data.items() if name != "passages"}),
            "control": self.control is not None,
            "steps": self.steps,
            "held_out_loss": {"before": self.before.lm, "after": final.lm if self.kept else self.before.lm},
        }

    def __str__(self) -> str:
        """Return a few lines: what was trained, and the losses before and after."""
        width = max(len(label) for label, _ in self.losses)
        lines = [
            f"recovery: LoRA rank {self.config['rank']}, loss {self.config['loss']}, {self.steps} steps "
            f"(best: {self.best_step}), {describe_training(self.data)}",
            *(f"  {label:<{width}}  {describe_losses(losses, self.kl_label)}" for label, losses in self.losses),
        ]
        if not self.kept:
            lines.append("  no step was better than none: the model is as it was")
        if self.zeros_before:
            lines.append(f"  zeros {self.zeros_before:,} -> {self.zeros_after:,} (merge {self.config['merge']!r})")
        return "\n".join([*lines, f"  took {self.seconds:.1f} s", *(f"warning: {text}" for text in self.warnings)])


def describe_losses(losses: Losses, kl_label: str) -> str:
    """Word losses in one line."""
    kl = "" if losses.kl is None else f", {kl_label} {losses.kl:.4f}"
    perplexity = math.exp(losses.lm) if losses.lm < 700 else math.inf  # where floats end
    return f"held-out loss {losses.lm:.4f} (perplexity {perplexity:,.2f}){kl}"


def describe_training(data: dict[str, Any]) -> str:
    """Describe a `TrainingData.to_dict()` in one line of Markdown."""
    sources = ", ".join(f"{describe_origin(source)} ({source['share']:.0%})" for source in data["sources"])
    begins = dict.fromkeys(f"`{source['begins_with']}`" for source in data["sources"] if "begins_with" in source)
    windows = f", each window of text begins with {' or '.join(begins)}" if begins else ""
    return f"{data['samples']:,} samples, {data['trained_tokens']:,} tokens of {sources}{windows}"
