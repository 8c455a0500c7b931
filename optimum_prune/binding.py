"""From an adapter's declarations to the live modules of a model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from optimum_prune import registry
from optimum_prune.adapters.base import Adapter, CoupledGroup, Stack
from optimum_prune.configs import stack_config
from optimum_prune.errors import InvalidConfig, UnsupportedArchitecture, UnsupportedModel, unknown
from optimum_prune.skipping import Skipped
from optimum_prune.wrapping import check_unwrapped

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What a plain weight may be. Narrower floating-point types are quantised: their scales live elsewhere."""


@dataclass(frozen=True)
class BoundStack:
    """A declared stack that the model has: its path there, and its blocks."""

    stack: Stack
    path: str
    blocks: nn.ModuleList


@dataclass(frozen=True)
class BoundGroup:
    """One coupled group of one block, with its modules. Everything is read off the live modules, nothing is cached.

    Attributes:
        group: what the adapter declares.
        declared: the stack, as the adapter declares it.
        stack: path of the stack in this model.
        layer: index of the block.
        block: the block.
    """

    group: CoupledGroup
    declared: Stack
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
    def tables(self) -> list[nn.Embedding]:
        """Embeddings whose columns carry the units; only some blocks have them."""
        return [table for _, table in self.named_tables]

    @property
    def named_tables(self) -> list[tuple[str, nn.Embedding]]:
        """`tables` with their full module paths."""
        found = ((f"{self.stack}.{self.layer}.{path}", submodule(self.block, path)) for path in self.group.tables)
        return [(name, table) for name, table in found if table is not None]  # pyright: ignore[reportReturnType]

    @property
    def linear_names(self) -> list[str]:
        """Full module paths of `linears`, in their order."""
        return [f"{self.stack}.{self.layer}.{path}" for path in self.group.writers + self.group.readers]

    @property
    def named_readers(self) -> list[tuple[str, nn.Linear]]:
        """`readers` with their full module paths."""
        return list(zip(self.linear_names[len(self.group.writers) :], self.readers, strict=True))

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
    """Find the adapter of a model by its config's `model_type`, and that of a language model inside by its own.

    Raises:
        UnsupportedArchitecture: there is none, or it is no transformers model.
        UnsupportedModel: the model is wrapped.
    """
    check_unwrapped(model)
    config: Any = model.config
    adapter: Adapter = registry.load("adapters", config.model_type)
    return replace(adapter, stacks=tuple(_typed(stack, config) for stack in adapter.stacks))


def _typed(stack: Stack, config: Any) -> Stack:
    """Return a stack with the blocks that the adapter of its own model type declares, where there is one."""
    if not stack.by_type:
        return stack
    try:
        inner: list[Stack] = list(registry.load("adapters", stack_config(config, stack).model_type).stacks)
    except UnsupportedArchitecture:
        return stack
    where = {name: getattr(stack, name) for name in ("path", "name", "default", "config", "by_type")}
    return replace(inner[0], **where) if len(inner) == 1 else stack


def stacks(model: nn.Module, adapter: Adapter) -> list[BoundStack]:
    """Find the declared stacks that the model has, in the order in which data flows through them.

    Besides the declared path, three others are tried: without the model's `base_model_prefix`, because `AutoModel`
    returns the headless base model (`layers`, not `model.layers`); with that prefix in front, because T5's classifiers
    hold a T5; and with that prefix as first part, because Llama's class for question answering calls its base model
    `transformer`.
    """
    prefix = getattr(model, "base_model_prefix", "") + "."
    modules = dict(model.named_modules())
    return [
        BoundStack(stack, path, modules[path])  # pyright: ignore[reportArgumentType]
        for stack in adapter.stacks
        for path in dict.fromkeys(
            (
                stack.path,
                stack.path.removeprefix(prefix),
                prefix + stack.path,
                prefix + stack.path.partition(".")[2],
            )
        )
        if path in modules
    ]


def bind(model: nn.Module, adapter: Adapter | None = None) -> list[BoundGroup]:
    """Bind every coupled group of every block, in the order of the stacks and blocks; a skipped sub-layer has none.

    Raises:
        UnsupportedArchitecture: no adapter knows the model's type.
        UnsupportedModel: the modules are not where the adapter says, or are not plain linears (quantised, wrapped).
    """
    adapter = adapter or adapter_for(model)
    live = stacks(model, adapter)
    if not live:
        raise UnsupportedModel(
            f"{type(model).__name__} has no {' or '.join(stack.path for stack in adapter.stacks)}, where the blocks "
            f"of a {adapter.model_type} model are expected, so this class cannot be pruned. Load another class of that "
            f"type, e.g. {adapter.auto_class}.from_pretrained(...)."
        )
    bound = [
        BoundGroup(group, found.stack, found.path, layer, block)
        for found in live
        for layer, block in enumerate(found.blocks)
        for group in (_alternative(declared, block) for declared in found.stack.groups)
        if not isinstance(submodule(block, group.site), Skipped)
    ]
    for group in bound:
        _check(group)
    return bound


def named_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return every linear that belongs to a coupled group, by its module path, in the order of the model."""
    return {
        name: linear for group in bind(model) for name, linear in zip(group.linear_names, group.linears, strict=True)
    }


def select(
    bound: Sequence[BoundGroup],
    units: Sequence[str] | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
) -> list[BoundGroup]:
    """Keep the groups that a config targets.

    Without `names` of stacks, those are taken that the adapter prunes by default.

    A pattern (shell style, `*` and `?`) matches a linear, or any module that contains it: `model.layers.0` and
    `model.layers.*.mlp` are patterns. Linears of a group are coupled, so one that matches decides for its group.

    Raises:
        InvalidConfig: a unit or stack that the model does not have, a pattern that matches nothing, nothing left to
            prune, or a part of groups that are tied.
    """
    check_names(names, [group.declared for group in bound])
    available = list(dict.fromkeys(group.unit for group in bound))
    for unit in units or ():
        if unit not in available:
            raise InvalidConfig(unknown("unit", unit, available))
    linears = [name for group in bound for name in group.linear_names]
    check_patterns([*(include or ()), *(exclude or ())], linears, _example_names(bound))
    selected = [
        group
        for group in bound
        if (group.declared.default if names is None else group.declared.name in names)
        and (units is None or group.unit in units)
        and is_targeted(group.linear_names, include, exclude)
    ]
    if not selected:
        raise InvalidConfig(
            f"Nothing is left to prune: stacks={names}, units={units}, include={include}, exclude={exclude} leave none "
            f"of {len(bound)} groups."
        )
    _check_ties(bound, selected)
    return selected


def matches(name: str, pattern: str) -> bool:
    """Tell whether a pattern (shell style) matches a module, or any module that contains it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def is_targeted(names: Sequence[str], include: Sequence[str] | None, exclude: Sequence[str] | None) -> bool:
    """Tell whether patterns choose what goes by any of these module paths; without `include`, all is chosen."""
    included = include is None or any(matches(name, pattern) for pattern in include for name in names)
    return included and not any(matches(name, pattern) for pattern in exclude or () for name in names)


def check_patterns(patterns: Sequence[str], names: Sequence[str], examples: Sequence[str]) -> None:
    """Refuse a pattern that matches none of the module paths; `examples` are shown to choose from."""
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            raise InvalidConfig(unknown("module pattern", pattern, examples))


def check_names(names: Sequence[str] | None, declared: Sequence[Stack]) -> None:
    """Refuse the name of a stack that the model does not have."""
    available = list(dict.fromkeys(stack.name for stack in declared))
    for name in names or ():
        if name not in available:
            raise InvalidConfig(unknown("stack", name, available))


def check_prunable(model: nn.Module, bound: Sequence[BoundGroup]) -> None:
    """Refuse weights that cannot be pruned, by name, before anything is touched.

    Raises:
        UnsupportedModel: a targeted weight is not in memory, not finite, or shared with another module.
    """
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for group in bound:
        for name, part in (*zip(group.linear_names, group.linears, strict=True), *group.named_tables):
            weight = part.weight
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
            for kind, parameter in part.named_parameters(recurse=False):
                # A NaN is the least and the greatest of all.
                if parameter.numel() and not torch.isfinite(torch.stack(torch.aminmax(parameter))).all():
                    raise UnsupportedModel(
                        f"{name}.{kind} holds NaN or infinite values: the checkpoint is damaged, or it was cast to a "
                        "dtype with too small a range. Reload it, in bfloat16 or float32."
                    )


def _alternative(group: CoupledGroup | tuple[CoupledGroup, ...], block: nn.Module) -> CoupledGroup:
    """Of alternatives, choose the one whose first linear the block has; else the first, for the error's sake."""
    if isinstance(group, CoupledGroup):
        return group
    return next((candidate for candidate in group if submodule(block, candidate.writers[0])), group[0])


def _check_ties(bound: Sequence[BoundGroup], selected: Sequence[BoundGroup]) -> None:
    """Refuse to take a part of what has to keep the same units, or as many: one kind of unit in one stack."""
    for group in selected:
        if group.group.tied is None:
            continue
        left_out = [
            other.name
            for other in bound
            if (other.stack, other.unit) == (group.stack, group.unit) and other.group.tied and other not in selected
        ]
        if left_out:
            raise InvalidConfig(
                f"Every block of {group.stack} keeps the same number of {group.unit}s, so {group.name} cannot be "
                f"pruned without {left_out[0]} ({len(left_out)} left out). Choose by stacks and units, without "
                "patterns that divide them."
            )


def _check(group: BoundGroup) -> None:
    """Check that a group's modules are plain linears whose axes fall into equal units."""
    names, paths = group.linear_names, group.group.writers + group.group.readers
    modules: list[Any] = [submodule(group.block, path) for path in paths]
    for name, module in zip(names, modules, strict=True):
        if module is None:
            raise UnsupportedModel(f"{name} is missing: the blocks are not those of a known model.")
        if not _is_plain(module):
            raise UnsupportedModel(
                f"{name} is a {_describe(module)}, not a plain linear layer: the model is quantised or wrapped. "
                "Prune the plain model (load without a quantizer, merge or unload adapters), then quantise or tune."
            )
    units, writers = group.num_units, len(group.group.writers)
    # A table is read by head: one column each.
    if any(table.weight.shape[1] != units for table in group.tables):
        raise UnsupportedModel(f"{group.name} has {units} units, but its table has not as many columns.")
    for place, (name, module) in enumerate(zip(names, modules, strict=True)):
        width = module.weight.shape[0 if place < writers else 1]
        if units == 0 or width % units:
            raise UnsupportedModel(
                f"{name} carries {width} rows or columns, which do not fall into {units} equal units."
            )


def _is_plain(module: nn.Module) -> bool:
    # The exact type: a quantised weight is a subclass of Parameter or Tensor, a reparameterised one no Parameter.
    weight = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) and type(weight) is nn.Parameter and weight.dtype in DTYPES


def submodule(module: nn.Module, path: str) -> nn.Module | None:
    """Return the submodule at a path, or None where there is none."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _describe(module: nn.Module) -> str:
    weight = getattr(module, "weight", None)
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    if not isinstance(weight, torch.Tensor):
        return kind
    return f"{kind} (weight: {type(weight).__name__}, {weight.dtype})"


def _example_names(bound: Sequence[BoundGroup]) -> list[str]:
    first = [group for group in bound if group.layer == 0]
    return [name.replace(".0.", ".*.") for group in first for name in (group.name, *group.linear_names)]


def _attribute(block: nn.Module, path: str) -> int:
    parent, _, attribute = path.rpartition(".")
    return getattr(block.get_submodule(parent), attribute)
