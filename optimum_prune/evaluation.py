"""Perplexity, accuracy, KL to the dense model and size of a live model: measured, never derived.

Logits are what evaluation spends its memory on: 2048 tokens of a vocabulary of 150,000 take 1.2 GB. So the
*input* of the output embedding is taken in a pre-hook, and logits are made from it a few tokens at a time.
Kept for a whole evaluation set, the same states stand for the dense model after it was pruned in place.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.utils import logging

from optimum_prune.calibration.data import CalibrationData
from optimum_prune.calibration.devices import input_device, machine, moved
from optimum_prune.errors import CalibrationError
from optimum_prune.measurements import Evaluation
from optimum_prune.modes import evaluating

CHUNK = 128
"""Tokens whose logits are held at a time: 77 MB in float32 for a vocabulary of 150,000."""
PROBE = 8
"""Tokens on which the output embedding is checked."""
ToLogits = Callable[[Tensor], Tensor]
"""States `(tokens, hidden)` -> logits `(tokens, vocab)`."""


@dataclass(frozen=True)
class Head:
    """Logits of the inputs of an output embedding: `embedding(states)`, soft-capped where the config asks for that.

    Attributes:
        embedding: linear, `(tokens, hidden)` -> `(tokens, vocab)`.
        cap: Gemma's `final_logit_softcapping`.
    """

    embedding: nn.Module
    cap: float | None = None

    def __call__(self, states: Tensor) -> Tensor:
        """Return logits."""
        logits = self.embedding(states)
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@dataclass(frozen=True)
class DenseReference:
    """A dense model on an evaluation set, in `tokens * hidden` numbers instead of `tokens * vocab`.

    Nothing is rounded: logits are made of the states as the dense model makes them, in its dtype.

    Attributes:
        states: inputs of its output embedding where it predicts, `(P_i, hidden)` per sequence, on the CPU.
        probe: logits of the first tokens, `(PROBE, vocab) float32`; a changed output embedding changes them.
        data: fingerprint of the evaluation data.
        head: its output embedding, on the CPU; None where only that of the pruned model is to be used.
    """

    states: list[Tensor]
    probe: Tensor
    data: str
    head: Head | None = None


def dense_reference(
    model: PreTrainedModel, data: CalibrationData, *, batch_size: int = 1, keep_head: bool = False
) -> DenseReference | None:
    """Capture a dense model before it is pruned in place, for `evaluate_model` to compare with.

    Args:
        model: left as it was.
        data: evaluation data.
        batch_size: sequences a forward.
        keep_head: keep the output embedding too, for a model that may have another one, or another dtype.

    Returns:
        None, with a warning, where logits are more than the output embedding's output (scaled).
    """
    data.check_predicts()
    with evaluating(model), torch.no_grad():
        head = _plain_head(model, data)
        if head is None:
            warnings.warn(
                f"The KL to the dense model is not available for {type(model).__name__}: its logits are not "
                "what its output embedding returns.",
                stacklevel=2,
            )
            return None
        states = [states.cpu() for _, states in _sequences(model, head, data, batch_size, "Dense")]
        kept = _kept(head) if keep_head else None
        return DenseReference(states, _probe(model, head, states), data.fingerprint, kept)


def evaluate_model(
    model: PreTrainedModel,
    data: CalibrationData,
    *,
    batch_size: int = 1,
    reference: DenseReference | None = None,
) -> Evaluation:
    """Measure perplexity, accuracy, KL and size of a model; `measure_latency` measures latency.

    Args:
        model: left as it was.
        data: evaluation data.
        batch_size: sequences a forward; the numbers do not depend on it (except by rounding).
        reference: of the dense model on the same data.

    Raises:
        CalibrationError: there is nothing to predict in the data, or the reference is of other data.
    """
    if reference is not None and reference.data != data.fingerprint:
        raise CalibrationError(
            f"The dense model was measured on other data ({reference.data}) than this ({data.fingerprint})."
        )
    data.check_predicts()
    measured: list[_Sums] = []
    with evaluating(model), torch.no_grad():
        head = _plain_head(model, data)
        dense_head = reference and _dense_head(model, head, reference)
        dense = reference.states if reference and dense_head else repeat(None)
        sequences = _sequences(model, head, data, batch_size, "Evaluation")
        for (labels, states), dense_states in zip(sequences, dense, strict=False):
            measured.append(_sums(head or nn.Identity(), labels, states, dense_head or nn.Identity(), dense_states))
    perplexity, divergence = _means(measured, with_kl=dense_head is not None)
    tokens, right = sum(sums.tokens for sums in measured), [sums.right for sums in measured]
    return Evaluation(
        perplexity=perplexity,
        kl=divergence,
        accuracy=sum(right) / tokens,
        exact_match=_exact_match(measured) if data.task else None,
        tokens=tokens,
        sequences=len(measured),
        parameters=model.num_parameters(),
        weight_bytes=weight_bytes(model),
        data=data.to_dict(),
        **machine(model),
    )


def weight_bytes(model: nn.Module) -> int:
    """Count the bytes of the distinct tensors of the state dict: what safetensors stores after its header."""
    # keep_vars: the parameters themselves, of which tied ones are one object
    distinct = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.nbytes for tensor in distinct.values())


@dataclass(frozen=True)
class _Sums:
    """Sums over the predicted tokens of one sequence: `-log Q(token)`, `sum_v P (log P - log Q)`, tokens got right."""

    nll: float
    kl: float
    right: int
    tokens: int


def _exact_match(measured: list[_Sums]) -> float:
    """Return the share of sequences that greedy generation would get right to the last token."""
    asked = [sums for sums in measured if sums.tokens]
    return sum(sums.right == sums.tokens for sums in asked) / len(asked)


def _means(measured: list[_Sums], with_kl: bool) -> tuple[float, float | None]:
    from optimum_prune.metrics import KLDivergence, Perplexity  # here, because it brings `evaluate`

    tokens = [sums.tokens for sums in measured]
    with TemporaryDirectory() as scratch:  # evaluate makes folders for a cache even when it works in memory
        metric = Perplexity(keep_in_memory=True, cache_dir=scratch)
        found: Any = metric.compute(nll=[sums.nll for sums in measured], tokens=tokens)
        if not with_kl:
            return found["perplexity"], None
        metric = KLDivergence(keep_in_memory=True, cache_dir=scratch)
        divergence: Any = metric.compute(kl=[sums.kl for sums in measured], tokens=tokens)
        return found["perplexity"], divergence["kl_divergence"]


@contextmanager
def _head_input(head: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what the output embedding is given; it makes logits of the first `PROBE` tokens only."""
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(args[0])
        return (args[0][:, :PROBE], *args[1:])

    handle = head.register_forward_pre_hook(hook)
    try:
        yield seen
    finally:
        handle.remove()


def _plain_head(model: PreTrainedModel, data: CalibrationData) -> Head | None:
    """Return the output embedding if its output, soft-capped or not, is to the bit the logits of the model."""
    embedding = model.get_output_embeddings()
    if embedding is None:
        return None
    head = Head(embedding, getattr(model.config.get_text_config(), "final_logit_softcapping", None))
    batch = next(data.batches(1, pad_token_id=0))
    with _head_input(embedding) as seen:
        logits = model(**moved(batch, model), use_cache=False).logits  # (1, PROBE, vocab)
    plain = len(seen) == 1 and torch.equal(head(seen[0][:, :PROBE]).float(), logits.float())
    return head if plain else None


def _kept(head: Head) -> Head | None:
    """Return a head on the CPU that outlives its model; None where its weights are offloaded."""
    state = head.embedding.state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        return None
    d_out, d_in = state["weight"].shape
    linear = nn.Linear(d_in, d_out, bias="bias" in state, device="meta")
    linear.load_state_dict(state, assign=True)
    return replace(head, embedding=linear.cpu())


def _sequences(
    model: PreTrainedModel, head: Head | None, data: CalibrationData, batch_size: int, what: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `labels (P,)` of each sequence and the `states (P, hidden)` to predict them; logits where head is None."""
    batches = data.batches(batch_size, pad_token_id=0)  # any id will do: it is masked in attention and here
    total = math.ceil(len(data.samples) / batch_size)
    index = 0
    for batch in logging.tqdm(batches, desc=what, unit="batch", total=total):
        inputs = moved(batch, model)
        if head is None:
            states = model(**inputs, use_cache=False).logits
        else:
            with _head_input(head.embedding) as seen:
                model(**inputs, use_cache=False)
            (states,) = seen
        for row in states:
            positions, labels = data.predicted(index)
            yield labels, row[positions.to(row.device)]
            index += 1


def _sums(head: ToLogits, labels: Tensor, states: Tensor, dense_head: ToLogits, dense: Tensor | None) -> _Sums:
    """Sum over a sequence's predicted tokens, some of them at a time.

    Args:
        head: turns states into logits.
        labels: `(P,) int64`.
        states: `(P, hidden)`; Q is made of them.
        dense_head: turns dense states into logits.
        dense: `(P, hidden)` of the dense model; P is made of them. Without it there is no KL.
    """
    nll = kl = 0.0
    right = 0
    for start in range(0, len(labels), CHUNK):
        part = slice(start, start + CHUNK)
        log_q = head(states[part]).float().log_softmax(dim=-1)  # (chunk, vocab)
        wanted = labels[part].to(log_q.device)
        nll += F.nll_loss(log_q, wanted, reduction="none").double().sum().item()
        right += int((log_q.argmax(dim=-1) == wanted).sum())
        if dense is not None:
            log_p = dense_head(dense[part].to(states.device)).float().log_softmax(dim=-1)
            kl += F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).double().sum().item()
    return _Sums(nll, kl, right, len(labels))


def _probe(model: PreTrainedModel, head: Head, states: list[Tensor]) -> Tensor:
    first = next((sequence for sequence in states if len(sequence)), states[0])
    return head(first[:PROBE].to(input_device(model), model.dtype)).float().cpu()


def _dense_head(model: PreTrainedModel, head: Head | None, reference: DenseReference) -> Head | None:
    """Return what makes the dense model's logits of its states: the model's own head if it still does, or the kept one.

    Where it is neither, or the vocabularies differ, it is None, with a warning.
    """
    then = reference.probe
    if head is not None:
        now = _probe(model, head, reference.states)
        # Another device rounds differently; 1e-4 of the largest logit is far below what moves a printed KL.
        if now.shape == then.shape and (now - then).abs().max() <= 1e-4 * then.abs().max():
            return head
    if (kept := reference.head) is not None and model.config.get_text_config().vocab_size == then.shape[-1]:
        return replace(kept, embedding=kept.embedding.to(input_device(model)))
    warnings.warn(
        "The KL to the dense model is not measured: the output embedding has changed since the dense model "
        "was captured.",
        stacklevel=3,
    )
    return None
