"""Measurements as data, and the table that sets a pruned model beside its dense one."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from importlib.util import find_spec
from statistics import median
from typing import Any

from optimum_prune.errors import InvalidConfig
from optimum_prune.report import align, describe_data

STAGES = ("dense", "pruned", "recovered", "control")
"""What evaluations are of, in the order of columns; `"control"` is the dense model after the recovery's training."""


@dataclass(frozen=True)
class Spread:
    """Median and range of repeated measurements."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Summarise values."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Latency:
    """Measured latency of one model.

    Attributes:
        prefill_ms: milliseconds of `generate` with one new token.
        decode_ms_per_token: milliseconds of each further step of `generate`, for one token of every sequence.
        prefill_tokens: length of the prompt.
        decode_tokens: new tokens.
        batch_size: sequences at a time.
        repeats: measurements of each kind, the warm-up not counted.
        timed_at: start of the measurement, ISO 8601 with time zone; the same for models that were timed in turn.
    """

    prefill_ms: Spread
    decode_ms_per_token: Spread
    prefill_tokens: int
    decode_tokens: int
    batch_size: int
    repeats: int
    timed_at: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """Measurements of one model; `str()` is a table.

    Attributes:
        perplexity: `exp(mean negative log-likelihood)` over the predicted tokens.
        kl: `KL(dense || this)` in nats, mean over the same tokens; None where it was not measured.
        tokens: predicted tokens: all but the first of a sequence of text, all of an answer.
        sequences: sequences of the evaluation data.
        parameters: parameters, tied ones counted once.
        weight_bytes: bytes of the distinct tensors of the state dict, as safetensors stores them.
        device: `"cpu"`, or the model of the GPU.
        threads: CPU threads.
        dtype: of the weights.
        data: `CalibrationData.to_dict()` of the evaluation data.
        accuracy: share of predicted tokens that have the largest logit.
        exact_match: share of sequences of which all predicted tokens have it, as greedy generation needs; None where
            the data is running text, which nothing predicts to the end.
        prefill_ms: median; this and the rest are None until latency is measured.
        decode_ms_per_token: median.
        prefill_tokens: length of the prompt that was timed.
        decode_tokens: new tokens that were timed.
        timed_at: start of the timing, ISO 8601 with time zone; the same for models that were timed in turn.
        context: sentences on what the data has in common with the data of calibration and training.
    """

    perplexity: float
    kl: float | None
    tokens: int
    sequences: int
    parameters: int
    weight_bytes: int
    device: str
    threads: int
    dtype: str
    data: dict[str, Any]
    accuracy: float | None = None
    exact_match: float | None = None
    prefill_ms: float | None = None
    decode_ms_per_token: float | None = None
    prefill_tokens: int | None = None
    decode_tokens: int | None = None
    timed_at: str | None = None
    context: list[str] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood of a predicted token, in nats."""
        return math.log(self.perplexity)

    @property
    def machine(self) -> str:
        """Where it was measured, in general words."""
        return describe_machine(self.device, self.threads, self.dtype)

    def is_alike(self, other: "Evaluation") -> bool:
        """Tell whether both were measured on the same data, by whatever path it was read."""
        return self.data["fingerprint"] == other.data["fingerprint"]

    def timed(self, latency: Latency) -> "Evaluation":
        """Return the same with the medians of a latency measurement."""
        return replace(
            self,
            prefill_ms=latency.prefill_ms.median,
            decode_ms_per_token=latency.decode_ms_per_token.median,
            prefill_tokens=latency.prefill_tokens,
            decode_tokens=latency.decode_tokens,
            timed_at=latency.timed_at,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Evaluation":
        """Read what `to_dict` returned, by this version or an earlier one, which knew fewer fields."""
        known = {option.name for option in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})

    def __str__(self) -> str:
        return comparison({"dense": self})


def describe_machine(device: str, threads: int, dtype: str) -> str:
    """Word what `calibration.devices.machine` returns."""
    return f"{device}, {dtype}, CPU threads: {threads}"


def check_evaluation(dataset: object, selection: str = "none") -> None:
    """Refuse an evaluation that cannot be made, before hours of work and not after.

    Raises:
        InvalidConfig: the package `evaluate` is missing, the data would be the model's own, or chosen to please it.
    """
    if find_spec("evaluate") is None:
        raise InvalidConfig("Evaluation needs the package 'evaluate': pip install 'optimum-prune[eval]'.")
    if isinstance(dataset, str) and dataset == "self":
        raise InvalidConfig("Evaluation needs text that the model did not write itself; pass other data than 'self'.")
    if selection != "none":
        raise InvalidConfig(
            f"selection={selection!r} has no meaning for evaluation, which measures on the first samples of its data. "
            "Leave it out."
        )


def comparison(evaluations: Mapping[str, Evaluation]) -> str:
    """Lay out measurements as a table; see `comparison_rows`."""
    final = latest(evaluations)
    rows = comparison_rows(evaluations)
    if len(evaluations) == 1:
        rows = rows[1:]  # a single column needs no heading
    lines = [*align(rows), f"measured on {describe_data(final.data)}; {final.machine}"]
    return "\n".join([*lines, *final.context, *filter(None, [timing_note(evaluations)])])


def timing_note(evaluations: Mapping[str, Evaluation]) -> str:
    """Describe how far apart dense and final model were timed; `""` where they were timed in turn, or not both.

    A machine may be busier, or warmer, at one of two moments: the ratio of two latencies is as good as they are near.
    """
    dense, final = evaluations.get("dense"), latest(evaluations)
    times = [evaluation.timed_at for evaluation in (dense, final) if evaluation is not None and evaluation.prefill_ms]
    if len(times) < 2 or times[0] == times[1] or None in times:
        return ""
    first, second = (datetime.fromisoformat(str(time)) for time in times)
    apart = _duration(abs((second - first).total_seconds()))
    return f"The latencies of the two models were measured {apart} apart, not in turn."


def latest(evaluations: Mapping[str, Evaluation]) -> Evaluation:
    """Return the measurements of the model as it is now."""
    return next(evaluations[name] for name in ("recovered", "pruned", "dense") if name in evaluations)


def comparison_rows(evaluations: Mapping[str, Evaluation]) -> list[tuple[str, ...]]:
    """Return a heading, and a row of all that was measured of the model as it is now; `""` where there is no number.

    There is a ratio to the dense model only of what was measured alike: on the same data, or on the same machine and
    lengths.

    Args:
        evaluations: by name, of `STAGES`.
    """
    shown = {name: evaluations[name] for name in STAGES if name in evaluations}
    final, dense = latest(shown), shown.get("dense")
    compared = dense is not None and final is not dense
    same_data = dense is not None and compared and dense.is_alike(final)
    same_run = dense is not None and compared and _run(dense) == _run(final)
    ratio_of = "recovered / dense" if "control" in shown else "ratio"  # it stands beside the control
    rows = [("", *shown, *([ratio_of] if compared else []))]
    for label, name, text, alike in (
        # Of an answer or a caption, the loss is what people know; of running text, the perplexity.
        ("loss per token", "loss", "{:.4f}".format, same_data)
        if final.data.get("task")
        else ("perplexity", "perplexity", _short, same_data),
        ("KL to the dense model", "kl", "{:.4f}".format, same_data),
        ("tokens predicted right", "accuracy", "{:.1%}".format, same_data),
        ("sequences all right", "exact_match", "{:.1%}".format, same_data),
        ("parameters", "parameters", "{:,}".format, compared),
        ("weights", "weight_bytes", megabytes, compared),
        (f"prefill of {final.prefill_tokens} tokens", "prefill_ms", "{:.1f} ms".format, same_run),
        ("decoding, per token", "decode_ms_per_token", "{:.1f} ms".format, same_run),
    ):
        values = {stage: getattr(evaluation, name) for stage, evaluation in shown.items()}
        before, after = values.get("dense"), getattr(final, name)
        if after is not None:
            ratio = f"{_short(after / before)}x" if before and alike else ""
            cells = ("" if value is None else text(value) for value in values.values())
            rows.append((label, *cells, *([ratio] if compared else [])))
    return rows


def megabytes(count: float) -> str:
    """Write a number of bytes in units of 10^6."""
    return f"{count / 1e6:,.1f} MB"


def _short(number: float) -> str:
    return f"{number:,.2f}" if number < 1000 else f"{number:,.0f}"


def _duration(seconds: float) -> str:
    unit, size = next((unit for unit in (("hours", 3600), ("minutes", 60)) if seconds >= 2 * unit[1]), ("seconds", 1))
    return f"{seconds / size:.0f} {unit}"


def _run(evaluation: Evaluation) -> tuple[object, ...]:
    return evaluation.machine, evaluation.prefill_tokens, evaluation.decode_tokens
