"""`evaluate` metrics of our own: means over tokens from sums over sequences. No Hub script, no network.

Importing this module imports `evaluate` and `datasets`; the package does so only where it measures.
"""

import math
from collections.abc import Sequence

import evaluate
from datasets import Features, Value

from optimum_prune.errors import CalibrationError

_INPUTS = """
Args:
    {sums}: per sequence, the sum over its predicted tokens, in nats.
    tokens: per sequence, the number of those tokens.
Returns:
    {result}: one float; every token weighs the same, whatever the length of its sequence.
"""


class Perplexity(evaluate.Metric):
    """Perplexity: `exp(sum of the negative log-likelihoods / number of tokens)`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Perplexity of a causal language model, weighted by tokens.",
            citation="",
            inputs_description=_INPUTS.format(sums="nll", result="perplexity"),
            features=Features({"nll": Value("float64"), "tokens": Value("int64")}),
        )

    def _compute(self, nll: Sequence[float], tokens: Sequence[int]) -> dict[str, float]:
        try:
            return {"perplexity": math.exp(_mean(nll, tokens))}
        except OverflowError:  # more than 709 nats a token: a broken model, but measured
            return {"perplexity": math.inf}


class KLDivergence(evaluate.Metric):
    """KL of a dense model P and a pruned one Q: the mean over tokens of `sum_v P (log P - log Q)`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="KL(dense || pruned) of the predicted distributions, weighted by tokens.",
            citation="",
            inputs_description=_INPUTS.format(sums="kl", result="kl_divergence"),
            features=Features({"kl": Value("float64"), "tokens": Value("int64")}),
        )

    def _compute(self, kl: Sequence[float], tokens: Sequence[int]) -> dict[str, float]:
        # Only rounding makes it negative. In this order, max() leaves a nan alone.
        return {"kl_divergence": max(_mean(kl, tokens), 0.0)}


def _mean(sums: Sequence[float], tokens: Sequence[int]) -> float:
    if not sum(tokens):
        raise CalibrationError("Nothing to measure: no sequence has a second token to predict.")
    return math.fsum(sums) / sum(tokens)
