"""What is no transformers model, or something around one, is refused by name in every public function."""

import pytest
import torch
from torch import nn
from transformers import LlamaModel

from optimum_prune import (
    CalibrationConfig,
    InvalidConfig,
    Pruner,
    PruningConfig,
    PruningError,
    RecoveryConfig,
    UnsupportedArchitecture,
    UnsupportedModel,
    accelerate_2_4_,
    apply_masks_,
    equivalent_rescale_,
    masks_of,
    prune,
    recover,
    rescaling_sites,
)
from optimum_prune.comparing.running import compare
from optimum_prune.planning.planner import make_plan
from optimum_prune.wrapping import check_language_model, check_unwrapped
from tests.models import llama, source

CONFIG = PruningConfig(scorer="magnitude", sparsity=0.3)
DATA = source(llama())
TAKERS = {
    "prune": lambda model: prune(model, CONFIG),
    "Pruner": Pruner,
    "plan": lambda model: make_plan(model, CONFIG),
    "recover": lambda model: recover(model, RecoveryConfig(DATA)),
    "compare": lambda model: compare(model, {"one": CONFIG}, CalibrationConfig(DATA)),
    "masks_of": masks_of,
    "apply_masks_": lambda model: apply_masks_(model, {}),
    "equivalent_rescale_": lambda model: equivalent_rescale_(model, {}),
    "rescaling_sites": rescaling_sites,
    "accelerate_2_4_": accelerate_2_4_,
}
"""Name of a public function -> a call of it with a model."""


def peft():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (lambda: None, UnsupportedArchitecture, "must be a transformers model, got NoneType.* AutoModelForCausalLM"),
        (lambda: "llama", UnsupportedArchitecture, "must be a transformers model, got 'llama', a str"),
        (lambda: nn.Linear(2, 2), UnsupportedArchitecture, r"Linear has no config\.model_type"),
        (
            lambda: nn.DataParallel(llama()),
            UnsupportedModel,
            r"DataParallel is a wrapper around LlamaForCausalLM\. .*without wrappers\. It is at `\.module`",
        ),
        (lambda: torch.compile(llama()), UnsupportedModel, r"OptimizedModule is a wrapper .* `\._orig_mod`"),
        (peft, UnsupportedModel, r"PeftModel is a wrapper around Llama.*without wrappers.*`merge_and_unload\(\)`"),
    ],
    ids=["None", "str", "Linear", "DataParallel", "compiled", "PEFT"],
)
def test_refused_by_name(taker, given, error, message):
    with pytest.raises(error, match=message) as caught:
        TAKERS[taker](given())
    assert "\n" not in str(caught.value)


def test_any_module_around_a_model_is_a_wrapper():
    """`DistributedDataParallel` among them, which cannot be made without a process group."""
    with pytest.raises(UnsupportedModel, match=r"Sequential is a wrapper around LlamaForCausalLM.*`\.0`"):
        check_unwrapped(nn.Sequential(llama()))


def test_a_plain_model_is_never_called_a_wrapper():
    model = LlamaModel(llama().config)
    check_unwrapped(model)
    del model.layers
    with pytest.raises(PruningError, match=r"LlamaModel has no model\.layers") as caught:
        prune(model, CONFIG)
    assert "wrapper" not in str(caught.value)


def test_a_model_without_a_language_model_head():
    with pytest.raises(InvalidConfig, match="Only language models can be measured, and LlamaModel is none"):
        check_language_model(LlamaModel(llama().config), "measured")
    check_language_model(llama(), "measured")


def test_gradients_without_a_head_are_refused_by_the_plan_too():
    model = LlamaModel(llama().config)
    config = PruningConfig(scorer="taylor", sparsity=0.3, calibration=CalibrationConfig(DATA))
    for refused in (make_plan, prune):
        with pytest.raises(UnsupportedModel, match=r"LlamaModel gives no logits.* Choose a scorer that"):
            refused(model, config)
