"""The training of the scales that choose the masks of one block; see `induction`."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from optimum_prune.config import InductionConfig
from optimum_prune.layerwise import Call
from optimum_prune.scales import metric, penalty, soft_mask

Masks = dict[str, Tensor]


@dataclass(frozen=True)
class Candidate:
    """A linear whose mask is learned.

    Attributes:
        block: module path of the block that it is in.
        linear: pruned in place.
        choose: `scores (d_out, d_in) float32 -> mask (d_out, d_in) bool`, with the count that is asked for.
        pool: consecutive weights that `choose` ranks together.
    """

    block: str
    linear: nn.Linear
    choose: Callable[[Tensor], Tensor]
    pool: int


@dataclass(frozen=True)
class Passes:
    """What a block is given, and what it returned before it was pruned, micro-batch by micro-batch."""

    block: nn.Module
    given: Sequence[Call]
    targets: Sequence[Tensor]

    def loss(self) -> float:
        """Return the mean square difference to the targets."""
        squares = sum(
            (output(self.block, call).float() - target.float()).square().sum().item()
            for call, target in zip(self.given, self.targets, strict=True)
        )
        return squares / sum(target.numel() for target in self.targets)

    def gradients(self, index: int, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of one micro-batch's mean square difference, float32.

        What runs through the block has norm 1: squares of float16 would overflow, and their means vanish.
        """
        call, target = self.given[index], self.targets[index]
        with torch.enable_grad():
            returned = output(self.block, call)
            error = returned.detach().float() - target.float()
            norm = error.norm().clamp_min(torch.finfo(torch.float32).tiny)
            found = torch.autograd.grad(
                returned, parameters, (error / norm).to(returned.dtype), allow_unused=True, materialize_grads=True
            )
        return [gradient.float() * (2 * norm / error.numel()).to(gradient.device) for gradient in found]


def output(block: nn.Module, call: Call) -> Tensor:
    """Return the hidden states that a block makes of what it is given."""
    returned: Any = block(*call.args, **call.kwargs)
    return returned[0] if isinstance(returned, tuple) else returned


class Shared:
    """Linears that read one input; the scales of that input, and where it is centred.

    Attributes:
        members: by name.
        weights: before anything was pruned, by name.
        biases: the same; of linears whose bias is not to be shifted, none.
        root: `(d_in,) float32`, what weights are multiplied with in scores, beside the scales: `spread`, or ones.
        mean: `(d_in,) float32`, of the input.
        spread: `(d_in,) float32`, root of the mean square of the input.
        theta: `(d_in,) float32`, logarithms of the scales.
        offset: `(d_in,) float32`, of delta from the mean, in units of `spread`.
    """

    def __init__(
        self,
        members: Mapping[str, Candidate],
        weights: Mapping[str, Tensor],
        biases: Mapping[str, Tensor],
        root: Tensor,
        mean: Tensor,
        spread: Tensor,
    ):
        self.members, self.weights, self.biases = members, weights, biases
        self.root, self.mean, self.spread = root, mean, spread
        self.theta, self.offset = torch.zeros_like(root), torch.zeros_like(root)

    @property
    def parameters(self) -> list[Tensor]:
        """The weights, and the biases that are shifted."""
        biases = [self.members[name].linear.bias for name in self.biases]
        return [*(member.linear.weight for member in self.members.values()), *biases]

    @property
    def delta(self) -> Tensor:
        """What biases take for the input of the weights that go, `(d_in,) float32`.

        For one linear the best there is would be the mean, which it starts at; for the block it is not.
        """
        return self.mean + self.spread * self.offset

    def masks(self) -> Masks:
        """Choose by the scales as they are."""
        return {
            name: member.choose(metric(self.weights[name], self.root, self.theta))
            for name, member in self.members.items()
        }

    def write_(self, masks: Masks, delta: Tensor | None) -> None:
        """Prune the linears; biases become `b + (W - W M) delta`, or with None what they were."""
        for name, member in self.members.items():
            weight = self.weights[name]
            member.linear.weight.copy_(weight * masks[name]).add_(0)  # turns -0.0 into 0
            if name in self.biases:
                shift = 0 if delta is None else (weight.float() * ~masks[name]) @ delta
                member.linear.bias.copy_(self.biases[name].float() + shift)

    def restore_(self) -> None:
        """Make the linears dense again; biases are as they always were where none is shifted."""
        for name, member in self.members.items():
            member.linear.weight.copy_(self.weights[name])

    def gradient(self, masks: Masks, gradients: Mapping[Tensor, Tensor], temperature: float) -> Tensor:
        """Return the gradient of theta, `(d_in,) float32`: straight through the masks, as if they were soft."""
        theta = self.theta.clone().requires_grad_()
        total = torch.zeros_like(theta)
        for name, member in self.members.items():
            weight, of_mask = self.weights[name], gradients[member.linear.weight]
            if name in self.biases:
                of_mask = of_mask - gradients[member.linear.bias][:, None] * self.delta
            with torch.enable_grad():
                soft = soft_mask(weight, self.root, theta, masks[name], member.pool, temperature)
            total += torch.autograd.grad(soft, theta, of_mask * weight)[0]
        return total

    def offset_gradient(self, masks: Masks, gradients: Mapping[Tensor, Tensor]) -> Tensor:
        """Return the gradient of the offset, `(d_in,) float32`."""
        total = torch.zeros_like(self.offset)
        for name in self.biases:
            gone = self.weights[name].float() * ~masks[name]
            total += gradients[self.members[name].linear.bias] @ gone
        return total * self.spread

    def centre_(self, limit: float) -> None:
        """Keep the geometric mean of the scales at 1, and their logarithms within a limit."""
        self.theta.sub_(self.theta.mean()).clamp_(-limit, limit)


@dataclass(frozen=True)
class Found:
    """The best that training came by; nothing, where no loss was finite.

    Attributes:
        loss: held out.
        masks: of all linears of the block.
        deltas: see `write_`.
    """

    loss: float = math.inf
    masks: Masks = field(default_factory=dict)
    deltas: Sequence[Tensor] | None = None


def train_(
    shared: Sequence[Shared], passes: Passes, held_out: Passes, unit: float, config: InductionConfig, seed: int
) -> Found:
    """Train scales and deltas of one block; the loss is the mean square difference, in units of the scorer's own.

    Args:
        shared: of the block, in the order of the forward; their linears are left somehow pruned.
        passes: to train on; each micro-batch is a step.
        held_out: to choose by: the epoch, and whether biases are shifted.
        unit: loss of the scorer's own masks.
        config: of the training.
        seed: of the order of the micro-batches.

    Returns:
        What has the lowest loss on `held_out`, of all epochs.
    """
    biased = [group for group in shared if group.biases]
    generator = torch.Generator("cpu").manual_seed(seed)
    trained = [*(group.theta for group in shared), *(group.offset for group in biased)]
    optimiser = torch.optim.Adam(trained, lr=config.learning_rate)
    last = max(config.epochs * len(passes.given) - 1, 1)
    best = Found()
    for epoch in range(config.epochs):
        order = torch.randperm(len(passes.given), generator=generator, device="cpu").tolist()
        for step, index in enumerate(order, start=epoch * len(order)):
            ratio = config.temperature_end / config.temperature_start
            temperature = config.temperature_start * ratio ** (step / last)
            _differentiate_(shared, passes, index, unit, temperature, config)
            optimiser.step()
            for group in shared:
                group.centre_(math.log(config.bound))
        masks = _masks(shared)
        for deltas in (None, [group.delta for group in shared]) if biased else (None,):
            write_(shared, masks, deltas)
            best = min(best, Found(held_out.loss(), masks, deltas), key=lambda found: found.loss)
    return best


def write_(shared: Sequence[Shared], masks: Masks, deltas: Sequence[Tensor] | None) -> None:
    """Prune all linears of a block.

    Args:
        shared: of the block.
        masks: by name.
        deltas: one for each of `shared`; None leaves biases as they were.
    """
    for group, delta in zip(shared, deltas or [None] * len(shared), strict=True):
        group.write_(masks, delta)


def _masks(shared: Sequence[Shared]) -> Masks:
    """Choose all masks of a block by the scales as they are."""
    return {name: mask for group in shared for name, mask in group.masks().items()}


def _differentiate_(
    shared: Sequence[Shared], passes: Passes, index: int, unit: float, temperature: float, config: InductionConfig
) -> None:
    """Set the gradients of all scales and offsets."""
    masks = _masks(shared)
    write_(shared, masks, [group.delta for group in shared])
    parameters = [parameter for group in shared for parameter in group.parameters]
    with _differentiable(parameters):
        found = passes.gradients(index, parameters)
    gradients = dict(zip(parameters, found, strict=True))
    for group in shared:
        gradient = group.gradient(masks, gradients, temperature) / unit
        group.theta.grad = gradient.nan_to_num(0, 0, 0)  # float16 may overflow on its way back
        group.offset.grad = (group.offset_gradient(masks, gradients) / unit).nan_to_num(0, 0, 0)
    if config.spectral:
        _add_penalty_(shared, config)


@contextmanager
def _differentiable(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Parameters of a frozen model that require a gradient for a while."""
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)


def _add_penalty_(shared: Sequence[Shared], config: InductionConfig) -> None:
    thetas = [group.theta.clone().requires_grad_() for group in shared]
    with torch.enable_grad():
        parts = [(w, theta) for group, theta in zip(shared, thetas, strict=True) for w in group.weights.values()]
        found = torch.autograd.grad(penalty(parts, config.spectral_alpha, config.spectral_power), thetas)
    for group, gradient in zip(shared, found, strict=True):
        assert group.theta.grad is not None, "that of the loss comes first"
        group.theta.grad += config.spectral * gradient
