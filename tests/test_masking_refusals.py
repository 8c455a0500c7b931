"""Runs that make no zeros, or not all of them: refused by name, or interrupted."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false

import pytest
import torch

from optimum_prune import (
    InvalidConfig,
    PruningError,
    UnsupportedModel,
    masking,
    registry,
)
from optimum_prune.masking import find_mask_targets
from optimum_prune.pipeline import prune
from optimum_prune.scorers.base import Scorer
from tests.damage import nan_norm, nan_weight, on_meta, plain, quantised, shared
from tests.models import llama
from tests.zeroed import (
    CALIBRATED,
    config,
    zeros,
)


def nan_embedding(model):
    model.model.embed_tokens.weight.data.fill_(torch.nan)


def overflow(model):
    model.half().model.layers[1].mlp.down_proj.weight.data.fill_(6e4)


REFUSED = [
    # CASES.md 9 and 15
    (nan_weight, {}, UnsupportedModel, r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN"),
    (nan_weight, {"scorer": "magnitude"}, UnsupportedModel, r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN"),
    (nan_norm, {}, UnsupportedModel, r"input of model\.layers\.1\.self_attn\.q_proj is not finite"),
    (nan_embedding, {}, UnsupportedModel, r"input of model\.layers\.0\.self_attn\.q_proj is not finite"),
    (overflow, {}, UnsupportedModel, r"input of model\.layers\.2\.self_attn\.q_proj is not finite .*bfloat16"),
    (shared, {}, UnsupportedModel, "is shared between"),
    (quantised, {}, UnsupportedModel, r"up_proj is a .*int8.*not a plain linear"),
    (on_meta, {}, UnsupportedModel, r"layers\.1\.self_attn\.k_proj\.weight is not in memory"),
    # CASES.md 14
    (
        plain,
        {"pattern": "3:5"},
        InvalidConfig,
        r"layers\.0\.self_attn\.k_proj has 32 inputs, .* groups of 5\. Leave it",
    ),
    (
        plain,
        {"pattern": "2:3", "include": ["*.down_proj", "*.1.mlp.up_proj"]},
        InvalidConfig,
        r"1\.mlp\.up_proj has 32 ",
    ),
    (
        plain,
        {"exclude": ["no_such_layer"]},
        InvalidConfig,
        r"'no_such_layer'; supported: 'model\.layers\.\*\.self_attn\.k"
        r"_proj', .*'model\.layers\.\*\.mlp\.down_proj'\.",
    ),
    (
        plain,
        {"include": ["model.layers.*.mlp.up_prj"]},
        InvalidConfig,
        r"Did you mean 'model\.layers\.\*\.mlp\.up_proj'\?",
    ),
    (plain, {"include": ["lm_head"]}, InvalidConfig, "Unknown module pattern 'lm_head'"),
    (plain, {"exclude": ["*"]}, InvalidConfig, "Nothing is left to prune: .*exclude=.*leave none of 21 linears"),
    (plain, {"stacks": ["encoder"]}, InvalidConfig, "Unknown stack 'encoder'; supported: 'decoder'"),
    (
        plain,
        {"scorer": "ntk"},
        InvalidConfig,
        "'ntk' ranks for .* cannot choose for '2:4'; .*: 'admm', 'afr', .*'sparsegpt', 'wanda'",
    ),
    (plain, {"scorer": "block_influence"}, InvalidConfig, "cannot choose for '2:4'"),
]
UNSTRUCTURED = [
    ({"sparsity": {"*.mlpp": 0.5}}, r"Unknown module pattern '\*\.mlpp'"),
    (
        {"sparsity": {"*.mlp": 0.5, "*.up_proj": 0.6}},
        r"several fractions of model\.layers\.0\.mlp\.up_proj: \{'\*\.mlp': 0\.5, '\*\.up_proj': 0\.6\}\. Let",
    ),
    ({"sparsity": {"*.mlp": 0.5}, "exclude": ["*.mlp"]}, "Nothing is left to prune"),
    (
        {"sparsity": 0.03, "scorer": "wanda"},
        r"k_proj: a sparsity of 0\.03 removes none of 32 .*; one is 0\.0312\. Raise",
    ),
    ({"sparsity": 1e-4}, r"removes none of 512 weights"),
    ({"sparsity": 1e-5, "scorer": "magnitude", "allocation": "global"}, r"removes none of 23040 weights"),
    (
        {"allocation": "global", "scorer": "wanda"},
        "allocation='global' is not possible with wanda, .* one row or matrix; possible: 'auto', 'row', 'matrix'",
    ),
    (
        {"allocation": "global", "scorer": "sparsegpt"},
        "not possible with sparsegpt, .* one matrix; possible: 'auto', 'matrix'",
    ),
    ({"allocation": "row", "scorer": "sparsegpt"}, "not possible with sparsegpt"),
    ({"allocation": "matrix", "scorer": "admm"}, "not possible with admm, .* one row; possible: 'auto', 'row'"),
    (
        {"allocation": "global", "scorer": "magnitude", "sparsity": {"*.mlp": 0.5}},
        "has one sparsity for all; sparsity must be a number, not a mapping",
    ),
]


class TestRefusedRunsLeaveTheModelAlone:
    @pytest.mark.parametrize(
        ("spoil", "options", "error", "message"), REFUSED, ids=lambda v: getattr(v, "__name__", None)
    )
    def test_by_name(self, spoil, options, error, message):
        model = llama().train()
        spoil(model)
        before = untouched(model)
        with pytest.raises(error, match=message):
            prune(model, config(**options))
        assert untouched(model) == before

    @pytest.mark.parametrize(("options", "message"), UNSTRUCTURED)
    def test_fractions_and_rankings(self, options, message):
        model = llama()
        before = untouched(model)
        with pytest.raises(InvalidConfig, match=message):
            prune(model, zeros(**options))
        assert untouched(model) == before

    @pytest.mark.parametrize(
        ("scorer", "allocation"),
        [
            ("magnitude", "row"),
            ("magnitude", "matrix"),
            ("random", "global"),
            ("wanda", "row"),
            ("sparsegpt", "matrix"),
            ("admm", "row"),
        ],
    )
    def test_what_is_said_to_be_possible_is(self, scorer, allocation):
        assert prune(llama(), zeros(scorer=scorer, allocation=allocation)).allocation == allocation

    def test_inputs_are_never_ranked_over_the_model(self, monkeypatch):
        scorer = Scorer("theirs", registry.load("scorers", "wanda").score, "", ("unstructured",), inputs="norm")
        with pytest.raises(InvalidConfig, match="possible: 'auto', 'row', 'matrix'"):
            find_mask_targets(llama(), zeros(allocation="global"), scorer)

    def test_peft(self):
        from peft import LoraConfig, get_peft_model

        wrapped = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))
        before = untouched(wrapped)
        with pytest.raises(UnsupportedModel, match="without wrappers"):
            prune(wrapped, config())
        assert untouched(wrapped) == before

    @pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
    @pytest.mark.parametrize("scorer", CALIBRATED)
    def test_interrupted_in_the_trace(self, error, scorer):
        model = llama().train()
        before = untouched(model)
        handle = model.model.layers[1].register_forward_hook(raising(error, at=1))
        with pytest.raises(error):
            prune(model, config(scorer=scorer))
        handle.remove()
        assert untouched(model) == before

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no more")], ids=repr)
    @pytest.mark.parametrize("scorer", CALIBRATED)
    def test_interrupted_while_pruning_says_so(self, error, scorer):
        model = llama().train()
        handle = model.model.layers[1].register_forward_hook(raising(error, at=3))
        with pytest.raises(PruningError, match=r"interrupted .*the model is partly pruned\. Load it again") as raised:
            prune(model, config(scorer=scorer))
        handle.remove()
        assert raised.value.__cause__ is error
        before, after = untouched(llama().train()), untouched(model)
        assert {**before, "values": 0, "parameters": 0, "modules": 0} == {
            **after,
            "values": 0,
            "parameters": 0,
            "modules": 0,
        }
        assert [flags[1:] for flags in before["modules"]] == [flags[1:] for flags in after["modules"]]
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()

    def test_interrupted_without_calibration_says_so(self, monkeypatch):
        monkeypatch.setattr(masking, "_zero_", raising(KeyboardInterrupt, at=2))
        with pytest.raises(PruningError, match="partly pruned"):
            prune(llama(), config(scorer="magnitude"))


def raising(error, at):
    calls = []

    def hook(*_):
        calls.append(1)
        if len(calls) == at:
            raise error

    return hook


def untouched(model):
    """Everything that a refused run must leave alone."""
    return {
        "values": {n: [] if t.is_meta else t.view(torch.uint8).tolist() for n, t in model.state_dict().items()},
        "config": model.config.to_dict(),
        "parameters": list(map(id, model.parameters())),
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "modules": [(id(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
    }
