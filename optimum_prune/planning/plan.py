"""What a plan says: pure data, the same in JSON, printable as a table."""

from dataclasses import asdict, dataclass, field
from typing import Any

from optimum_prune.bounds import Range
from optimum_prune.class_switch import offer
from optimum_prune.errors import InvalidConfig
from optimum_prune.planning.layout import Forecast
from optimum_prune.planning.table import table

VERSION = 1


@dataclass(frozen=True)
class PlannedGroup:
    """One coupled group, one layer of pattern `"layers"`, or one linear of which single weights go.

    Attributes:
        name: full module path, e.g. `model.layers.3.mlp`.
        stack: module path of the stack of blocks, e.g. `model.layers`.
        layer: index of the block in its stack.
        site: path of the group in its block, e.g. `mlp`; empty for a whole block.
        unit: kind of unit.
        now: units that it has.
        kept: units that it will keep; of weights, those that are not set to zero.
        reachable: counts that it can keep; of heads and MLP channels only those that `tensor_parallel` divides. None
            for weights, of which it can keep any number.
    """

    name: str
    stack: str
    layer: int
    site: str
    unit: str
    now: int
    kept: Range
    reachable: list[int] | None


@dataclass(frozen=True)
class PlannedTotal:
    """All groups of one kind in one stack.

    Attributes:
        stack: module path of the stack.
        unit: kind of unit.
        asked: fraction of its weights that should go, after gamma has spread it.
        now: units that there are.
        removed: units that will go.
        achieved: fraction of the weights that will go, lowest and highest.
    """

    stack: str
    unit: str
    asked: float
    now: int
    removed: Range
    achieved: tuple[float, float]


@dataclass(frozen=True)
class Plan:
    """What `prune` would do to a model; `str()` is a table.

    A `Range` is exact where nothing depends on scores, and else encloses what the run will give.

    Attributes:
        config: `PruningConfig.to_dict()`.
        model_type: as in the model's config.
        dtype: of the model.
        asked: fraction of the targeted weights that should go.
        allocation: the one used; never `"auto"`.
        gamma: path of a stack -> MLP sparsity over attention sparsity; None where the allocation has none.
        tensor_parallel: devices among which heads and MLP channels are to be divided.
        groups: the targeted groups, layers or linears.
        totals: the same, by stack and kind of unit.
        before: `parameters`, `weight_bytes`, and bytes of keys and values per token, of the model as it is.
        after: the same of the pruned model.
        layout: that the result can be saved in.
        warnings: a sentence each.
    """

    config: dict[str, Any]
    model_type: str
    dtype: str
    asked: float
    allocation: str
    gamma: dict[str, float] | None
    tensor_parallel: int
    groups: list[PlannedGroup]
    totals: list[PlannedTotal]
    before: dict[str, int]
    after: dict[str, Range]
    layout: Forecast
    warnings: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether all that `after` says is known before the scores."""
        return all(cost.exact for cost in self.after.values())

    def check_layout(self, layout: str, class_switch: bool = False) -> None:
        """Refuse a layout that the result cannot be saved in, or may not.

        Args:
            layout: as for `Pruner.save_pretrained`.
            class_switch: likewise.

        Raises:
            InvalidConfig: with the reason, and what would do.
        """
        if layout == "padded" and self.layout.not_padded and self.layout.layout != "stock":
            raise InvalidConfig(
                f"layout='padded' cannot be promised: {self.layout.not_padded}, and zeros do not stand for that. Use "
                "layout='compact'."
            )
        if layout != "stock" or self.layout.layout == "stock" or (class_switch and self.layout.class_switch):
            return
        if self.config["pattern"] == "layers":
            advice = "drop whole blocks (units=['layer'])"
        else:
            heads = {f"{counts} of {stack}" for stack, counts in self.layout.stock_heads.items()}
            takes = f"; the class takes kv_groups {', '.join(sorted(heads))}" if heads else ""
            advice = f"prune to equal sizes that the class takes (allocation='uniform'{takes})"
        padded = "" if self.layout.not_padded else "layout='padded', "
        raise InvalidConfig(
            f"layout='stock' is not {'possible' if self.layout.layout == 'compact' else 'certain'}: "
            f"{self.layout.reason}. Use {offer(self.layout.class_switch)}layout='compact', {padded}or {advice}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"version": VERSION, "exact": self.exact} | asdict(self)

    def __str__(self) -> str:
        """Return a table: what each layer can and will keep, and what the model is before and after."""
        return table(self)
