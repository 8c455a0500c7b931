"""SI as a scorer: Wanda's scores, for masks alone; what is learned on top is tested with induction."""

import torch

from optimum_prune import registry
from optimum_prune.scorers.base import Statistics


def test_its_scores_are_those_of_wanda():
    si, wanda = (registry.load("scorers", name) for name in ("si", "wanda"))
    weight, statistics = torch.randn(4, 8), Statistics(torch.Generator(), norm=torch.rand(8))
    assert torch.equal(si.score(weight, statistics), wanda.score(weight, statistics))
    assert (si.inputs, si.scope, si.comparable) == (wanda.inputs, wanda.scope, wanda.comparable)


def test_facts():
    si = registry.load("scorers", "si")
    assert si.name == "si" and si.patterns == ("unstructured", "n:m") and "2602.21652" in si.reference
