"""Zeros in live models: configs that ask for them, and what is left to compare."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from optimum_prune import CalibrationConfig, PruningConfig, PruningReport
from optimum_prune.binding import BoundGroup, bind, select
from tests.models import source, tokens

LENGTHS = (12, 5, 9, 12, 7, 12)
SAMPLES = [tokens(1, length, seed=i)[0].tolist() for i, length in enumerate(LENGTHS)]
SCORERS = ["magnitude", "random", "wanda", "sparsegpt", "admm"]
CALIBRATED = ["wanda", "sparsegpt", "admm"]


def config(pattern: str = "2:4", **options: Any) -> PruningConfig:
    """Return a config of n:m zeros that is calibrated on `SAMPLES`."""
    calibration = options.pop("calibration", CalibrationConfig(SAMPLES, num_samples=len(SAMPLES)))
    return PruningConfig(pattern=pattern, calibration=calibration, **options)


def zeros(**options: Any) -> PruningConfig:
    """Return a config of unstructured zeros, half of all where nothing is said."""
    return config("unstructured", **{"sparsity": 0.5} | options)


def for_model(model: PreTrainedModel, samples: int = 4) -> CalibrationConfig:
    """Return data for any variant."""
    return CalibrationConfig(source(model, samples), num_samples=samples, seq_len=12)


def state(model: nn.Module) -> dict[str, Tensor]:
    """Copy all tensors of a model."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def bits(model: nn.Module) -> dict[str, list[int]]:
    """Return all bits of a model, those of a NaN too."""
    return {name: tensor.view(torch.uint8).tolist() for name, tensor in model.state_dict().items()}


def linears_of(model: nn.Module) -> dict[str, nn.Linear]:
    """Return every linear of every block, by name."""
    return {
        name: linear for group in bind(model) for name, linear in zip(group.linear_names, group.linears, strict=True)
    }


def targeted(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears of the stacks that are pruned by default, by name."""
    return {
        name: linear
        for group in select(bind(model))
        for name, linear in zip(group.linear_names, group.linears, strict=True)
    }


def removed(linear: nn.Linear) -> int:
    """Count zeros."""
    return int((linear.weight == 0).sum())


def excluded(model: nn.Module, m: int) -> list[str] | None:
    """Name the linears whose inputs do not fall into groups of m."""
    return [name for name, linear in targeted(model).items() if linear.in_features % m] or None


def assert_only_these_changed(model: nn.Module, before: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Compare with an earlier `state`; shapes and dtypes stay everywhere."""
    after = model.state_dict()
    assert after.keys() == before.keys()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {f"{name}.weight" for name in names}
    assert all(
        (tensor.shape, tensor.dtype) == (before[name].shape, before[name].dtype) for name, tensor in after.items()
    )


def dead_inputs(report: PruningReport, name: str) -> bool:
    """Tell whether the report says that a linear read inputs that are always zero."""
    return any(name in warning for warning in report.warnings)


def _by_name(groups: Sequence[BoundGroup]) -> dict[str, nn.Linear]:
    return {name: linear for group in groups for name, linear in zip(group.linear_names, group.linears, strict=True)}
