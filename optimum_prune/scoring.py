"""Scores of units on a live model: the bridge from pure scorers to bound groups."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from optimum_prune.binding import BoundGroup, adapter_for, stacks
from optimum_prune.calibration.data import CalibrationData
from optimum_prune.calibration.gradients import Gradients, Place, Wanted, stream_gradients
from optimum_prune.calibration.inputs import InputMoments, measure_inputs
from optimum_prune.errors import UnsupportedModel
from optimum_prune.objectives import Objective
from optimum_prune.scorers.base import Part, Scorer, Statistics, Units, weighted_units

Scores = dict[str, Tensor]
"""Name of a group -> scores of its units on the CPU, `(num_units,) float32` or `(num_units, terms)`."""


def score_groups(
    model: PreTrainedModel,
    groups: Sequence[BoundGroup],
    scorers: Sequence[Scorer],
    *,
    data: CalibrationData | None = None,
    batch_size: int = 4,
    seed: int = 0,
) -> list[Scores]:
    """Score the units of every group by every scorer: one forward for all, and one backward for each objective.

    Args:
        model: left as it was.
        groups: bound groups of `model`.
        scorers: what they look at decides whether `data` is needed.
        data: calibration samples; the scores do not depend on `batch_size` (but for the order of float additions).
        batch_size: samples a forward.
        seed: for scorers that draw.

    Returns:
        For each scorer the scores of every group; larger = keep.

    Raises:
        UnsupportedModel: a score is not finite; the group is named.
    """
    done = [Scores() for _ in scorers]

    def score(chosen: Sequence[int], group: BoundGroup, statistics: Mapping[nn.Linear, Statistics]) -> None:
        for i in chosen:
            done[i][group.name] = _scored(scorers[i], group, statistics)

    for i, scorer in enumerate(scorers):
        if not scorer.needs_data:
            generator = torch.Generator().manual_seed(seed)
            for group in groups:
                score([i], group, {linear: Statistics(generator) for linear in group.linears})
    inputs = [i for i, scorer in enumerate(scorers) if scorer.inputs is not None]
    gradients = [i for i, scorer in enumerate(scorers) if scorer.needs_gradients]
    if not inputs and not gradients:
        return done
    assert data is not None, "the pipeline loads calibration data for every scorer that looks at any"
    known: dict[nn.Linear, Statistics] = {}
    if inputs:
        # Moments are large, so they are used as soon as they are there; norms and variances wait for the gradients.
        at_once = [i for i in inputs if i not in gradients]
        measured = partial(score, at_once) if at_once else None
        known = measure_groups(model, groups, [scorers[i] for i in inputs], data, batch_size, measured)
    if gradients:

        def join(group: BoundGroup, found: Mapping[str, Gradients]) -> None:
            score(gradients, group, {linear: _joined(known.get(linear), linear, found) for linear in group.linears})

        stream_groups(model, groups, [scorers[i] for i in gradients], data, batch_size, join)
    return done


def score_weights(
    model: PreTrainedModel,
    groups: Sequence[BoundGroup],
    scorer: Scorer,
    data: CalibrationData,
    batch_size: int,
    use: Callable[[str, Tensor], None],
) -> None:
    """Score every single weight by a scorer that takes gradients.

    Args:
        model: left as it was.
        groups: bound groups of `model`.
        scorer: needs gradients.
        data: calibration samples.
        batch_size: samples a forward.
        use: called with the name of each linear and its scores, `(d_out, d_in) float32`; those of one block at a time.
    """
    known = measure_groups(model, groups, [scorer], data, batch_size, None) if scorer.inputs else {}

    def score(group: BoundGroup, found: Mapping[str, Gradients]) -> None:
        for name, linear in zip(group.linear_names, group.linears, strict=True):
            scores = scorer.score(linear.weight, _joined(known.get(linear), linear, found))
            if not torch.isfinite(scores).all():
                raise UnsupportedModel(f"The {scorer.name} scores of {name} are not finite.")
            use(name, scores)

    stream_groups(model, groups, [scorer], data, batch_size, score)


def measure_groups(
    model: PreTrainedModel,
    groups: Sequence[BoundGroup],
    scorers: Sequence[Scorer],
    data: CalibrationData,
    batch_size: int,
    use: Callable[[BoundGroup, Mapping[nn.Linear, Statistics]], None] | None,
) -> dict[nn.Linear, Statistics]:
    """Measure the inputs that scorers look at; hand each group to `use` when all of its own are there.

    Returns:
        What was measured of every linear, without the second moments.
    """
    of_all = any(scorer.reads == "all" for scorer in scorers)
    full = any(scorer.inputs == "hessian" for scorer in scorers)
    linears, owners, waiting = {}, {}, {}
    for group in groups:
        chosen = dict(zip(group.linear_names, group.linears, strict=True) if of_all else group.named_readers)
        linears |= chosen
        owners |= dict.fromkeys(chosen, group)
        waiting[group.name] = set(chosen)
    moments = {name for name in linears if full and linears[name] in owners[name].readers}
    known: dict[nn.Linear, Statistics] = {}

    def take(name: str, found: InputMoments) -> None:
        group, linear = owners[name], linears[name]
        known[linear] = Statistics(
            torch.Generator(),
            norm=found.norm,
            variance=found.variance,
            moment=found.moment if name in moments else None,
        )
        waiting[group.name].remove(name)
        if not waiting[group.name]:
            own = {linear: known[linear] for linear in group.linears if linear in known}
            if use is not None:
                use(group, {linear: own.get(linear, Statistics(torch.Generator())) for linear in group.linears})
            known.update({linear: replace(statistics, moment=None) for linear, statistics in own.items()})

    measure_inputs(model, linears, data, batch_size, moments, take)
    return known


def stream_groups(
    model: PreTrainedModel,
    groups: Sequence[BoundGroup],
    scorers: Sequence[Scorer],
    data: CalibrationData,
    batch_size: int,
    reduce: Callable[[BoundGroup, Mapping[str, Gradients]], None],
) -> None:
    """Hand every group the gradients that the scorers want, by name of the objective; groups of a block together."""
    if any(scorer.predicts for scorer in scorers):
        data.check_predicts()
    found = stacks(model, adapter_for(model))
    index = {stack.path: i for i, stack in enumerate(found)}
    members: dict[Place, list[BoundGroup]] = {}
    for group in groups:
        members.setdefault((index[group.stack], group.layer), []).append(group)

    def reduce_block(place: Place, gradients: Mapping[str, Gradients]) -> None:
        for group in members.get(place, ()):
            reduce(group, gradients)

    # Any id will do for padding: it is masked in attention, and no statistic looks at it.
    batches, labels = list(data.batches(batch_size, pad_token_id=0)), list(data.labels(batch_size))
    live = {stack.path: list(stack.blocks) for stack in found}
    stream_gradients(model, live, batches, labels, list(_wanted(scorers, members)), reduce_block)


def _wanted(scorers: Sequence[Scorer], members: Mapping[Place, Sequence[BoundGroup]]) -> Iterator[Wanted]:
    linears = {place: [linear for group in groups for linear in group.linears] for place, groups in members.items()}
    readers = {place: [linear for group in groups for linear in group.readers] for place, groups in members.items()}
    of_weights: list[Objective] = [objective for scorer in scorers for objective in scorer.objectives]
    of_gates = [scorer.gates for scorer in scorers if scorer.gates is not None]
    for objective in dict.fromkeys([*of_weights, *of_gates]):
        yield Wanted(
            objective,
            weights=linears if objective in of_weights else {},
            gates=readers if objective in of_gates else {},
        )


def _joined(known: Statistics | None, linear: nn.Linear, found: Mapping[str, Gradients]) -> Statistics:
    """Join what is known of a linear's input with its gradients, by name of the objective."""
    return replace(
        known or Statistics(torch.Generator()),
        gradients={name: g.weights[linear] for name, g in found.items() if linear in g.weights},
        gates={name: g.gates[linear] for name, g in found.items() if linear in g.gates},
    )


def _scored(scorer: Scorer, group: BoundGroup, statistics: Mapping[nn.Linear, Statistics]) -> Tensor:
    units = Units(
        [Part(linear.weight, statistics[linear]) for linear in group.writers],
        [Part(linear.weight, statistics[linear]) for linear in group.readers],
        group.num_units,
    )
    score_units = scorer.score_units or partial(weighted_units, scorer.score)
    with torch.no_grad():
        scores = score_units(units).cpu()
    if not torch.isfinite(scores).all():
        raise UnsupportedModel(f"The {scorer.name} scores of {group.name} are not finite.")
    return scores
