"""Adapters and scorers found by file name, and those that other packages bring."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import optimum_prune
from optimum_prune import registry
from optimum_prune.adapters.base import Adapter
from optimum_prune.config import PruningConfig
from optimum_prune.errors import InvalidConfig, UnsupportedArchitecture
from optimum_prune.scorers.base import Scorer

PACKAGE = Path(optimum_prune.__file__).parent
EXPORTS = {"adapters": Adapter, "scorers": Scorer}


@pytest.fixture
def other_package(tmp_path, monkeypatch):
    """Install a package that brings the scorer `zeros`, the architecture `new-lm`, and a second `ntk`."""
    (tmp_path / "other_package.py").write_text("ZEROS = 'zeros of another package'\nADAPTER = 'adapter'\n")
    metadata = tmp_path / "other_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[optimum_prune.scorers]\nzeros = other_package:ZEROS\nntk = other_package:ZEROS\n"
        "[optimum_prune.adapters]\nnew-lm = other_package:ADAPTER\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("kind", EXPORTS)
def test_every_file_is_available_and_exports_its_kind(kind):
    files = {file.stem for file in (PACKAGE / kind).glob("*.py")} - {"__init__", "base"}
    assert registry.available(kind) == sorted(files)
    for name in files:
        assert isinstance(registry.load(kind, name), EXPORTS[kind])


def test_a_new_scorer_is_one_new_file(tmp_path, monkeypatch):
    (tmp_path / "scorers").mkdir()
    for name in ("base", "__init__", "brand_new"):
        (tmp_path / "scorers" / f"{name}.py").write_text("raise RuntimeError('imported')")
    monkeypatch.setattr(registry, "__file__", str(tmp_path / "registry.py"))
    assert registry.available("scorers") == ["brand_new"]


def test_a_dash_of_a_model_type_is_an_underscore_of_a_file(tmp_path, monkeypatch):
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "new_lm.py").touch()
    monkeypatch.setattr(registry, "__file__", str(tmp_path / "registry.py"))
    monkeypatch.setitem(sys.modules, "optimum_prune.adapters.new_lm", SimpleNamespace(ADAPTER="it"))
    assert registry.load("adapters", "new-lm") == "it"


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_an_adapter_is_found_by_its_model_type(name):
    adapter = registry.load("adapters", name)
    assert isinstance(adapter, Adapter)
    assert adapter.model_type == name


@pytest.mark.parametrize(
    ("kind", "name", "error", "message"),
    [
        ("scorers", "magnitud", InvalidConfig, "Unknown scorer 'magnitud'; .*Did you mean 'magnitude'?"),
        ("scorers", "base", InvalidConfig, "Unknown scorer 'base'"),
        ("scorers", "__init__", InvalidConfig, "Unknown scorer '__init__'"),
        ("scorers", "../config", InvalidConfig, "Unknown scorer '../config'"),
        ("adapters", "lama", UnsupportedArchitecture, "Unknown architecture 'lama'; supported:"),
        (
            "adapters",
            "xlm-roberta",
            UnsupportedArchitecture,
            "Unknown architecture 'xlm-roberta'; supported:",
        ),
        ("adapters", "", UnsupportedArchitecture, "Unknown architecture ''"),
    ],
)
def test_an_unknown_name(kind, name, error, message):
    with pytest.raises(error, match=message):
        registry.load(kind, name)


@pytest.mark.usefixtures("other_package")
class TestOtherPackages:
    def test_are_listed_and_loaded(self):
        assert "zeros" in registry.available("scorers")
        assert registry.load("scorers", "zeros") == "zeros of another package"

    def test_may_name_a_model_type_with_a_dash(self):
        assert registry.load("adapters", "new-lm") == "adapter"

    def test_are_accepted_by_the_config(self):
        assert PruningConfig(sparsity=0.5, scorer="zeros").scorer == "zeros"

    def test_do_not_replace_our_own(self):
        assert isinstance(registry.load("scorers", "ntk"), Scorer)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "mt5", "gemma3"])
def test_a_model_type_is_never_taken_for_another_one(model_type):
    with pytest.raises(UnsupportedArchitecture) as caught:
        registry.load("adapters", model_type)
    assert "Did you mean" not in str(caught.value)
    assert f"optimum_prune/adapters/{model_type}.py" in str(caught.value)
    assert "entry point in the group 'optimum_prune.adapters'" in str(caught.value)
    with pytest.raises(InvalidConfig, match="Did you mean 'wanda'"):
        registry.load("scorers", "wandaa")
