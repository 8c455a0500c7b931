"""Python code that comes with a model: it runs where `trust_remote_code=True` was given, and nobody is asked."""

import json
import shutil

import pytest
from transformers import AutoModelForCausalLM

from optimum_prune import CheckpointError, Pruner, PruningConfig
from optimum_prune.integrations.layouts import verify_checkpoint
from optimum_prune.integrations.loading import load_skeleton
from tests.integrations.hub_server import Files, contents, loopback
from tests.models import llava
from tests.own_code import MODEL, MODEL_MAP, PROCESSOR, rewrite, with_own_model, with_own_tokenizer
from tests.words import tokenizer

MAGNITUDE = PruningConfig(scorer="magnitude", sparsity=0.3, allocation="global", round_to=1)
ON_TEXTS = PruningConfig.from_dict(
    {"sparsity": 0.3, "round_to": 1, "calibration": {"source": ["w3 w4 w5 w6"] * 60, "num_samples": 4, "seq_len": 16}}
)


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail(f"asked on stdin: {prompt}"))


@pytest.fixture
def own_tokenizer(tmp_path):
    return with_own_tokenizer(tmp_path / "own")


@pytest.fixture
def own_model(tmp_path):
    return with_own_model(tmp_path / "own-model")


@pytest.mark.parametrize("trust", [{}, {"trust_remote_code": None}, {"trust_remote_code": False}])
def test_code_of_a_tokenizer_is_refused_with_what_to_do(trust, own_tokenizer):
    with pytest.raises(CheckpointError, match=r"tokenizer of .*own cannot be loaded: .*pass trust_remote_code=True"):
        Pruner.from_pretrained(own_tokenizer, **trust)


def test_code_of_a_tokenizer_runs_where_it_is_trusted(own_tokenizer, tmp_path):
    pruner = Pruner.from_pretrained(own_tokenizer, trust_remote_code=True)
    assert type(pruner.tokenizer).__name__ == "OwnTokenizer"
    pruner.prune(ON_TEXTS)
    pruner.save_pretrained(tmp_path / "it")
    again = Pruner.from_pretrained(tmp_path / "it", trust_remote_code=True)
    assert type(again.tokenizer).__name__ == "OwnTokenizer"
    with pytest.raises(CheckpointError, match="trust_remote_code=True"):
        Pruner.from_pretrained(tmp_path / "it")


def test_code_of_a_processor(tmp_path):
    llava().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "processing_own.py").write_text(PROCESSOR)
    auto_map = {"AutoProcessor": "processing_own.OwnProcessor"}
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"processor_class": "OwnProcessor", "auto_map": auto_map})
    )
    with pytest.raises(CheckpointError, match=r"processor of .* cannot be loaded: .*pass trust_remote_code=True"):
        Pruner.from_pretrained(tmp_path)
    pruner = Pruner.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(pruner.processor).__name__ == "OwnProcessor"


def test_code_of_a_model_runs_where_it_is_trusted(own_model):
    """Without trust, the class of transformers that the model type names is loaded, as transformers does."""
    for load in (load_skeleton, lambda folder, **trust: Pruner.from_pretrained(folder, **trust).model):
        assert type(load(own_model)).__name__ == "LlamaForCausalLM"
        assert type(load(own_model, trust_remote_code=True)).__name__ == "OwnForCausalLM"


def test_an_unknown_type_is_refused_with_what_to_do(own_model):
    rewrite(own_model / "config.json", model_type="own")
    for load in (load_skeleton, Pruner.from_pretrained):
        with pytest.raises(CheckpointError, match="pass trust_remote_code=True"):
            load(own_model)


def test_revision_of_the_code(own_tokenizer, tmp_path, monkeypatch):
    """Code of another revision than the weights: of tokenizer and model, in the skeleton too."""
    with loopback(tmp_path, monkeypatch) as hub:
        (own_tokenizer / "modeling_own.py").write_text(MODEL)
        rewrite(own_tokenizer / "config.json", auto_map=MODEL_MAP)
        files = contents(own_tokenizer)
        repository = hub.create("me/own", files)
        newer: Files = {name: files[name].replace(b"version = 1", b"version = 2") for name in files}
        commit = repository.commit("newer", newer, "newer code")
        for revision, version in ((None, 1), (commit, 2)):
            options = {"trust_remote_code": True, **({"code_revision": revision} if revision else {})}
            pruner = Pruner.from_pretrained("me/own", **options)
            versions = pruner.tokenizer.version, pruner.model.version, load_skeleton("me/own", **options).version  # pyright: ignore
            assert versions == (version,) * 3


def test_dense_model_of_a_recovery_is_trusted_as_the_pruned_one(own_model, tmp_path):
    for trust, name in ((False, "LlamaForCausalLM"), (True, "OwnForCausalLM")):
        pruner = Pruner.from_pretrained(own_model, trust_remote_code=trust)
        load_dense = pruner._dense_loader(own_model)
        assert load_dense is not None and type(load_dense()).__name__ == name


def test_pruned_while_loading(own_tokenizer, own_model):
    with pytest.raises(CheckpointError, match=r"load it by Pruner.from_pretrained\(..., trust_remote_code=True\)"):
        AutoModelForCausalLM.from_pretrained(own_tokenizer, quantization_config=ON_TEXTS)
    # A scorer without data needs no tokenizer.
    AutoModelForCausalLM.from_pretrained(own_tokenizer, quantization_config=MAGNITUDE)
    for name in ("tokenization_own.py", "tokenizer_config.json"):
        shutil.copy(own_tokenizer / name, own_model / name)
    model = AutoModelForCausalLM.from_pretrained(own_model, quantization_config=ON_TEXTS, trust_remote_code=True)
    assert type(model).__name__ == "OwnForCausalLM" and model.pruning_report is not None


def test_verifying_asks_nobody(own_model):
    rewrite(own_model / "config.json", model_type="own")
    model = AutoModelForCausalLM.from_pretrained(own_model, trust_remote_code=True)
    verify_checkpoint(type(model), own_model)
