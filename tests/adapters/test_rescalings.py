"""What every adapter owes to the exact equivalent transform, on every model of its type."""
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import pytest
import torch

from optimum_prune.binding import named_linears
from optimum_prune.rescaling import equivalent_rescale_, rescaling_sites
from tests.models import VARIANTS, inputs
from tests.pruned import unevenly
from tests.rescaled import as_float64, distance, draw, logits

INEXACT = {
    "opt-350m": ("q_proj", "k_proj", "v_proj", "fc1"),  # their norms stand behind the sub-layers
    "t5": ("EncDecAttention.k", "EncDecAttention.v"),  # these read the encoder's last norm, in every block
    "t5-gated": ("EncDecAttention.k", "EncDecAttention.v"),
    "llava": ("mlp.fc2",),  # behind a GELU
    "llava-qwen2": ("mlp.fc2",),
}
"""Linears of a variant that read what no scale cancels in."""


@pytest.fixture(params=VARIANTS)
def name(request):
    return request.param


@pytest.fixture
def model(name, monkeypatch):
    # Gemma's norms cast to float32 whatever the dtype of the model, and would hide what is exact.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    model = as_float64(VARIANTS[name]())
    if hasattr(model.config, "vision_feature_layer"):
        model.config.vision_feature_layer = -1  # by default, nothing reads the last block of the tower
    return model


@torch.no_grad()
def generated(model):
    """Return the logits of each step of a greedy generation with a cache."""
    given = {key: tensor for key, tensor in inputs(model).items() if not key.startswith("decoder")}
    options = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    found = model.generate(**given, **options, output_logits=True, return_dict_in_generate=True)
    return torch.stack(found.logits)


def changed(site, state):
    """Name the tensors that a site may change."""
    outputs = [f"{module}.{kind}" for module in (site.divided, site.multiplied) for kind in ("weight", "bias")]
    return state.keys() & {*outputs, *(f"{reader}.weight" for reader in site.readers)}


def test_each_site_is_exact_and_changes_nothing_else(model):
    expected = logits(model)
    for site in rescaling_sites(model):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        equivalent_rescale_(model, draw([site]))
        assert distance(logits(model), expected) < 1e-9, site
        differs = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
        assert differs == changed(site, before)


def test_all_sites_at_once_and_with_a_cache(model):
    expected, steps = logits(model), generated(model)
    equivalent_rescale_(model, draw(rescaling_sites(model)))
    assert distance(logits(model), expected) < 1e-9
    assert distance(generated(model), steps) < 1e-9


def test_exact_after_units_were_cut(model):
    expected = logits(unevenly(model))
    equivalent_rescale_(model, draw(rescaling_sites(model)))
    assert distance(logits(model), expected) < 1e-9


def test_a_factor_that_is_not_undone_shows(model):
    expected = logits(model)
    for site in rescaling_sites(model):
        weight = model.get_submodule(site.divided).weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(1.1).add_(0.01)
            assert distance(logits(model), expected) > 1e-6, site
            weight.copy_(kept)


def test_every_linear_is_reached_or_known_not_to_be(name):
    model = VARIANTS[name]()
    reached = {reader for site in rescaling_sites(model) for reader in site.readers}
    missed = named_linears(model).keys() - reached
    ends = INEXACT.get(name, ())
    assert all(linear.endswith(ends) for linear in missed), missed
    assert all(any(linear.endswith(end) for linear in missed) for end in ends)


def test_a_site_has_one_name(name):
    model = VARIANTS[name]()
    sites = rescaling_sites(model)
    assert len({site.name for site in sites}) == len(sites)
    assert all(site.name in (site.divided, site.multiplied, *site.readers) for site in sites)
