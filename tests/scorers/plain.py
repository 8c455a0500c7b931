"""What scorers look at, the way everybody would compute it: one sample at a time, in float64, by whole backwards."""
# pyright: reportArgumentType=false, reportCallIssue=false

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from optimum_prune.binding import named_linears
from optimum_prune.calibration.data import CalibrationData


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).double().requires_grad_(False)


def forward(model: PreTrainedModel, data: CalibrationData, i: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return the logits of one sample, `(T, V)`, and `(position, token that it should predict)`."""
    ids = data.samples[i]
    if data.targets is not None:
        target = data.targets[i].tolist()
        given = torch.tensor([[data.start, *target[:-1]]])
        return model(input_ids=ids[None], decoder_input_ids=given).logits[0], list(enumerate(target))
    images = {} if data.images is None else {"pixel_values": data.images[i].to(model.dtype)}
    wanted = [(t, token) for t, token in enumerate(ids.tolist()[1:]) if token != data.image_token]
    return model(input_ids=ids[None], **images).logits[0], wanted


def loss(model: PreTrainedModel, data: CalibrationData, i: int) -> Tensor:
    """Return the negative log-likelihood of one sample, summed over tokens."""
    logits, wanted = forward(model, data, i)
    return torch.stack([-logits[position].log_softmax(dim=-1)[token] for position, token in wanted]).sum()


def predicted(model: PreTrainedModel, data: CalibrationData) -> int:
    return sum(len(forward(model, data, i)[1]) for i in range(len(data.samples)))


@contextmanager
def pushed(linears: dict[str, nn.Linear]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Add zeros to what linears read; yields name -> (input, those zeros), of which gradients can be taken."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name):
        def push(_, args):
            zeros = torch.zeros_like(args[0]).requires_grad_()
            seen[name] = args[0].detach(), zeros
            return (args[0] + zeros, *args[1:])

        return push

    handles = [linear.register_forward_pre_hook(hook(name)) for name, linear in linears.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def gradients(model: PreTrainedModel, value) -> dict[str, Tensor]:
    """Return the gradient of `value(model)` to the weight of every linear, by name."""
    model = in_float64(model)
    linears = named_linears(model)
    weights = [linear.weight.requires_grad_() for linear in linears.values()]
    found = torch.autograd.grad(value(model), weights, allow_unused=True)
    return {
        name: torch.zeros_like(weight) if gradient is None else gradient
        for name, weight, gradient in zip(linears, weights, found, strict=True)
    }


def inputs_of(model: PreTrainedModel, data: CalibrationData) -> dict[str, Tensor]:
    """Return what every linear reads of all samples, `(all tokens, d_in) float64`, by name."""
    model = in_float64(model)
    linears = named_linears(model)
    rows: dict[str, list[Tensor]] = {name: [] for name in linears}
    with torch.no_grad():
        for i in range(len(data.samples)):
            with pushed(linears) as seen:
                forward(model, data, i)
            for name, (x, _) in seen.items():
                rows[name].append(x.reshape(-1, x.shape[-1]))
    return {name: torch.cat(parts) for name, parts in rows.items() if parts}
