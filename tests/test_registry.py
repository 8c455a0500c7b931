"""Adapters and scorers are found by their file's name, or by another package's entry point."""

from pathlib import Path

import pytest
import torch

import optimum_prune
from optimum_prune import registry
from optimum_prune.adapters.base import Adapter
from optimum_prune.config import UNITS, PruningConfig
from optimum_prune.errors import InvalidConfig, UnsupportedArchitecture
from optimum_prune.pipeline import prune
from optimum_prune.scorers.base import Scorer
from tests.models import llama

KINDS = {"adapters": (Adapter, "model_type"), "scorers": (Scorer, "name")}


@pytest.fixture
def third_party(tmp_path, monkeypatch) -> Path:
    """Another distribution that is installed beside this one."""
    (tmp_path / "acme.py").write_text(
        """
from dataclasses import replace
from optimum_prune.adapters import llama
from optimum_prune.scorers.base import Scorer

ADAPTER = replace(llama.ADAPTER, model_type="acme-lm")
FEW = Scorer(name="wanda", score=lambda weight, statistics: -weight.float().square(), reference="Acme")
"""
    )
    about = tmp_path / "acme-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[optimum_prune.adapters]\nacme-lm = acme:ADAPTER\n[optimum_prune.scorers]\nwanda = acme:FEW\n"
        "ntk = acme:MISSING\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_is_found_and_loads(kind):
    files = {path.stem for path in (Path(optimum_prune.__file__).parent / kind).glob("[a-z]*.py")}
    names = registry.available(kind)
    assert names == sorted(files - {"base"}) and len(names) >= 2
    expected, key = KINDS[kind]
    for name in names:
        loaded = registry.load(kind, name)
        assert isinstance(loaded, expected) and getattr(loaded, key) == name


def test_every_kind_of_unit_can_be_asked_for():
    adapters = [registry.load("adapters", name) for name in registry.available("adapters")]
    assert {group.unit for adapter in adapters for stack in adapter.stacks for group in stack.groups} == set(
        UNITS
    )


@pytest.mark.parametrize("name", ["base", "lama", "", "__init__", "../config", "os"])
def test_unknown_adapter(name):
    with pytest.raises(
        UnsupportedArchitecture, match=f"^Unknown architecture '{name}'; supported: .*'llama'"
    ):
        registry.load("adapters", name)


def test_unknown_scorer():
    with pytest.raises(InvalidConfig, match=r"Unknown scorer 'magnitud'; .* Did you mean 'magnitude'\?$"):
        registry.load("scorers", "magnitud")


def test_third_party_adapter(third_party):
    assert "acme-lm" in registry.available("adapters")
    adapter = registry.load("adapters", "acme-lm")
    assert isinstance(adapter, Adapter) and adapter.model_type == "acme-lm"


def test_third_party_scorer_prunes(third_party):
    assert "wanda" in registry.available("scorers")
    model = llama()
    norms = model.model.layers[0].mlp.down_proj.weight.square().sum(0)
    norms += model.model.layers[0].mlp.gate_proj.weight.square().sum(1)
    norms += model.model.layers[0].mlp.up_proj.weight.square().sum(1)
    report = prune(model, PruningConfig(scorer="wanda", sparsity=0.5, units=["mlp_channel"]))
    assert report.groups[0].kept == torch.topk(norms, 24, largest=False).indices.sort().values.tolist()


def test_third_party_scorer_is_suggested(third_party):
    with pytest.raises(InvalidConfig, match=r"Unknown scorer 'wandaa'; .*'wanda'\. Did you mean 'wanda'\?$"):
        PruningConfig(scorer="wandaa", sparsity=0.2)


def test_our_own_file_wins(third_party):
    assert registry.available("scorers").count("ntk") == 1
    assert registry.load("scorers", "ntk").__class__ is Scorer
