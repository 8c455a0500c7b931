"""From an adapter's declarations to the live modules of a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from optimum_prune import registry
from optimum_prune.adapters.base import Adapter, CoupledGroup
from optimum_prune.errors import InvalidConfig, UnsupportedArchitecture, UnsupportedModel, unknown

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What a plain weight may be. Narrower floating-point types are quantised: their scales live elsewhere."""


@dataclass(frozen=True)
class BoundGroup:
    """One coupled group of one block, with its modules. Everything is read off the live modules, nothing is cached."""

    group: CoupledGroup
    stack: str
    layer: int
    block: nn.Module

    @property
    def unit(self) -> str:
        """Kind of unit, e.g. `"mlp_channel"`."""
        return self.group.unit

    @property
    def name(self) -> str:
        """Full module path of the group, e.g. `model.layers.3.mlp`."""
        return f"{self.stack}.{self.layer}.{self.group.site}"

    @property
    def writers(self) -> list[nn.Linear]:
        """Linears whose rows carry the units."""
        return [self._linear(path) for path in self.group.writers]

    @property
    def readers(self) -> list[nn.Linear]:
        """Linears whose columns carry the units."""
        return [self._linear(path) for path in self.group.readers]

    @property
    def linears(self) -> list[nn.Linear]:
        """Writers, then readers."""
        return self.writers + self.readers

    @property
    def linear_names(self) -> list[str]:
        """Full module paths of `linears`, in their order."""
        return [f"{self.stack}.{self.layer}.{path}" for path in self.group.writers + self.group.readers]

    @property
    def unit_size(self) -> int:
        """Rows of one unit in the first writer."""
        return 1 if self.group.unit_size is None else _attribute(self.block, self.group.unit_size)

    @property
    def num_units(self) -> int:
        """Units that the group holds now."""
        return self._linear(self.group.writers[0]).weight.shape[0] // self.unit_size

    @property
    def weights(self) -> int:
        """Number of weights (biases not counted) in the group's linears."""
        return sum(linear.weight.numel() for linear in self.linears)

    def counts(self) -> dict[str, int]:
        """Config attribute -> count, measured on the live modules."""
        return {
            attribute: self._linear(path).weight.shape[0] // self.unit_size
            for attribute, path in self.group.counts.items()
        }

    def _linear(self, path: str) -> nn.Linear:
        return self.block.get_submodule(path)  # pyright: ignore[reportReturnType]


def adapter_for(model: nn.Module) -> Adapter:
    """Find the adapter of a model by its config's `model_type`."""
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if not isinstance(model_type, str):
        raise UnsupportedArchitecture(
            f"{type(model).__name__} has no config.model_type, so its architecture is unknown. "
            "Pass a transformers model, e.g. AutoModelForCausalLM.from_pretrained(...)."
        )
    return registry.load("adapters", model_type)


def stacks(model: nn.Module, adapter: Adapter) -> dict[str, nn.ModuleList]:
    """Map the path of each declared stack that the model has to its blocks.

    The path is also tried without the model's `base_model_prefix`, since `AutoModel` returns the headless base model
    (`layers`, not `model.layers`).
    """
    prefix = getattr(model, "base_model_prefix", "") + "."
    modules = dict(model.named_modules())
    paths = {p for stack in adapter.stacks for p in (stack.path, stack.path.removeprefix(prefix)) if p in modules}
    return {path: modules[path] for path in sorted(paths)}  # pyright: ignore[reportReturnType]


def bind(model: nn.Module, adapter: Adapter | None = None) -> list[BoundGroup]:
    """Bind every coupled group of every block, in the order of the blocks.

    Raises:
        UnsupportedArchitecture: no adapter knows the model's type.
        UnsupportedModel: the modules are not where the adapter says, or are not plain linears (quantised, wrapped).
    """
    adapter = adapter or adapter_for(model)
    live = stacks(model, adapter)
    if not live:
        raise UnsupportedModel(
            f"{type(model).__name__} has no {' or '.join(stack.path for stack in adapter.stacks)}, where the blocks "
            f"of a {adapter.model_type} model are expected. Pass the transformers model itself, without wrappers."
        )
    declared = {path: stack for stack in adapter.stacks for path in live if stack.path.endswith(path)}
    bound = [
        BoundGroup(group, path, layer, block)
        for path, blocks in live.items()
        for layer, block in enumerate(blocks)
        for group in declared[path].groups
    ]
    for group in bound:
        _check(group)
    return bound


def select(
    bound: Sequence[BoundGroup],
    units: Sequence[str] | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
) -> list[BoundGroup]:
    """Keep the groups that a config targets.

    A pattern (shell style, `*` and `?`) matches a linear, or any module that contains it: `model.layers.0` and
    `model.layers.*.mlp` are patterns. Linears of a group are coupled, so one that matches decides for its group.

    Raises:
        InvalidConfig: a unit that the model does not have, a pattern that matches nothing, or nothing left to prune.
    """
    available = list(dict.fromkeys(group.unit for group in bound))
    for unit in units or ():
        if unit not in available:
            raise InvalidConfig(unknown("unit", unit, available))
    for pattern in (*(include or ()), *(exclude or ())):
        if not any(_matches(group, pattern) for group in bound):
            raise InvalidConfig(unknown("module pattern", pattern, _example_names(bound)))
    selected = [
        group
        for group in bound
        if (units is None or group.unit in units)
        and (include is None or any(_matches(group, pattern) for pattern in include))
        and not any(_matches(group, pattern) for pattern in exclude or ())
    ]
    if not selected:
        raise InvalidConfig(
            f"Nothing is left to prune: units={units}, include={include}, exclude={exclude} leave none of "
            f"{len(bound)} groups."
        )
    return selected


def check_prunable(model: nn.Module, bound: Sequence[BoundGroup]) -> None:
    """Refuse weights that cannot be pruned, by name, before anything is touched.

    Raises:
        UnsupportedModel: a targeted weight is not in memory, not finite, or shared with another module.
    """
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for group in bound:
        for name, linear in zip(group.linear_names, group.linears, strict=True):
            weight = linear.weight
            if weight.is_meta:
                raise UnsupportedModel(
                    f"{name}.weight is not in memory (meta device: offloaded, or never loaded). Load the model with a "
                    "device_map that keeps every layer on a CPU or GPU."
                )
            if weight.is_inference():
                raise UnsupportedModel(
                    f"{name}.weight was made under torch.inference_mode() and cannot change. Load the model outside."
                )
            if len(owners[id(weight)]) > 1:
                raise UnsupportedModel(f"{name}.weight is shared between {owners[id(weight)]}; it cannot be cut alone.")
            for kind, parameter in linear.named_parameters(recurse=False):
                if not torch.isfinite(parameter).all():
                    raise UnsupportedModel(
                        f"{name}.{kind} holds NaN or infinite values: the checkpoint is damaged, or it was cast to a "
                        "dtype with too small a range. Reload it, in bfloat16 or float32."
                    )


def _check(group: BoundGroup) -> None:
    for name, path in zip(group.linear_names, group.group.writers + group.group.readers, strict=True):
        try:
            module = group.block.get_submodule(path)
        except AttributeError:
            raise UnsupportedModel(f"{name} is missing: the blocks are not those of a known model.") from None
        if not _is_plain(module):
            raise UnsupportedModel(
                f"{name} is a {_describe(module)}, not a plain linear layer: the model is quantised or wrapped. "
                "Prune the plain model (load without a quantizer, merge or unload adapters), then quantise or tune."
            )
    axes = [linear.weight.shape[0] for linear in group.writers] + [linear.weight.shape[1] for linear in group.readers]
    for name, width in zip(group.linear_names, axes, strict=True):
        if group.num_units == 0 or width % group.num_units:
            raise UnsupportedModel(
                f"{name} carries {width} rows or columns, which do not fall into {group.num_units} equal units."
            )


def _is_plain(module: nn.Module) -> bool:
    # The exact type: a quantised weight is a subclass of Parameter or Tensor, a reparameterised one no Parameter.
    weight = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) and type(weight) is nn.Parameter and weight.dtype in DTYPES


def _describe(module: nn.Module) -> str:
    weight = getattr(module, "weight", None)
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    if not isinstance(weight, torch.Tensor):
        return kind
    return f"{kind} (weight: {type(weight).__name__}, {weight.dtype})"


def _matches(group: BoundGroup, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for name in group.linear_names)


def _example_names(bound: Sequence[BoundGroup]) -> list[str]:
    first = [group for group in bound if group.layer == 0]
    return [name.replace(".0.", ".*.") for group in first for name in (group.name, *group.linear_names)]


def _attribute(block: nn.Module, path: str) -> int:
    parent, _, attribute = path.rpartition(".")
    return getattr(block.get_submodule(parent), attribute)
