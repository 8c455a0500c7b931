"""Scores of units on a live model: the bridge from pure scorers to bound groups."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from optimum_prune.binding import BoundGroup, adapter_for, stacks
from optimum_prune.calibration.data import CalibrationData
from optimum_prune.calibration.gradients import Place, stream_gradients
from optimum_prune.errors import UnsupportedModel
from optimum_prune.scorers.base import Scorer, Statistics, unit_scores


def score_groups(
    model: PreTrainedModel,
    groups: Sequence[BoundGroup],
    scorer: Scorer,
    *,
    data: CalibrationData | None = None,
    batch_size: int = 4,
    seed: int = 0,
) -> list[Tensor]:
    """Score the units of every group.

    Args:
        model: left as it was.
        groups: bound groups of `model`.
        scorer: its objective decides whether `data` is needed.
        data: calibration samples; the scores do not depend on `batch_size` (but for the order of float additions).
        batch_size: samples a forward.
        seed: for scorers that draw.

    Returns:
        One `(num_units,) float32` CPU tensor per group; larger = keep.

    Raises:
        UnsupportedModel: a score is not finite; the group is named.
    """
    generator = torch.Generator().manual_seed(seed)
    scores: dict[str, Tensor] = {}

    def score(group: BoundGroup, gradients: Mapping[nn.Linear, Tensor]) -> None:
        writers, readers = (
            [scorer.score(linear.weight, Statistics(generator, gradients.get(linear))) for linear in linears]
            for linears in (group.writers, group.readers)
        )
        total = scorer.finish(unit_scores(writers, readers, group.num_units)).cpu()
        if not torch.isfinite(total).all():
            raise UnsupportedModel(f"The {scorer.name} scores of {group.name} are not finite.")
        scores[group.name] = total

    if scorer.objective is None:
        with torch.no_grad():
            for group in groups:
                score(group, {})
        return [scores[group.name] for group in groups]

    assert data is not None, "the pruner loads calibration data for every scorer that has an objective"
    found = stacks(model, adapter_for(model))
    index = {stack.path: i for i, stack in enumerate(found)}
    members: dict[Place, list[BoundGroup]] = {}
    for group in groups:
        members.setdefault((index[group.stack], group.layer), []).append(group)

    def score_block(place: Place, gradients: Mapping[nn.Linear, Tensor]) -> None:
        for group in members.get(place, ()):
            score(group, gradients)

    stream_gradients(
        model,
        {stack.path: list(stack.blocks) for stack in found},
        {place: [linear for group in here for linear in group.linears] for place, here in members.items()},
        # Any id will do for padding: it is masked in attention, and no statistic looks at it.
        list(data.batches(batch_size, pad_token_id=0)),
        scorer.objective,
        score_block,
    )
    return [scores[group.name] for group in groups]
