"""Continuous batching of compact models: the tokens of `generate`, or a refusal before anything runs."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import copy
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from optimum_prune import UnsupportedModel
from optimum_prune.batching import ENTRY
from optimum_prune.binding import bind
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.sizes import describe_
from optimum_prune.surgery import slice_
from tests.models import llama, llava, mistral, opt, qwen2, qwen3, t5, tokens

STEPS = 5
PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (7, 5)]
REFUSED = r"^Continuous batching \(generate_batch\) keeps keys and values of one size for all layers"


def cut(model, heads, channels=(16, 24, 32)):
    """Keep so many KV groups and MLP channels in each layer; return the layout."""
    for group in bind(model):
        if group.declared.default:
            slice_(group, range((heads if group.unit == "kv_group" else channels)[group.layer]))
    return describe_(model)


def batched(model):
    config = GenerationConfig(max_new_tokens=STEPS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    found = model.generate_batch(PROMPTS, generation_config=config, continuous_batching_config=small)
    return [found[name].generated_tokens for name in sorted(found)]


def alone(model):
    options = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in PROMPTS]


@pytest.mark.parametrize("build", [llama, mistral, qwen2, qwen3])
def test_equal_heads_and_uneven_channels(build, tmp_path):
    model = build()
    assert cut(model, heads=(2, 2, 2)) == "compact" and model.config.num_key_value_heads == 2
    save_checkpoint(model, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert batched(model) == batched(again) == alone(model)


@pytest.mark.parametrize("layout", ["compact", "padded"])
def test_unequal_heads(layout, tmp_path):
    """Padding makes them equal."""
    model = llama()
    assert cut(model, heads=(2, 4, 1)) == "compact"
    save_checkpoint(model, tmp_path, layout=layout)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    if layout == "padded":
        assert batched(again) == alone(model)
        return
    for refusing in (model, again, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(UnsupportedModel, match=REFUSED):
            batched(refusing)
        with pytest.raises(UnsupportedModel, match=REFUSED):
            refusing.init_continuous_batching()
    assert alone(model) == alone(again)


@pytest.mark.parametrize(
    ("build", "heads"), [(llama, (3, 3, 3)), (opt, (4, 4, 4)), (llava, (4, 2, 4)), (qwen2, (4, 4, 2))]
)
def test_a_number_that_no_config_says(build, heads):
    """Llama's and OPT's classes refuse numbers of heads, even where all layers agree."""
    model = build()
    assert cut(model, heads) == "compact"
    with pytest.raises(UnsupportedModel, match=REFUSED):
        model.init_continuous_batching()


def test_what_is_equal_again_is_allowed_again():
    model = llama()
    cut(model, heads=(2, 4, 1), channels=(48, 48, 48))
    assert ENTRY in vars(model)
    assert cut(model, heads=(1, 1, 1), channels=(48, 48, 48)) == "stock"
    assert ENTRY not in vars(model) and batched(model) == alone(model)


@pytest.mark.parametrize("build", [llama, opt, t5, llava])
def test_channels_alone_refuse_nothing(build):
    model = build()
    heads = next(group.num_units for group in bind(model) if group.unit == "kv_group" and group.declared.default)
    assert cut(model, heads=(heads, heads, heads)) == "compact" and ENTRY not in vars(model)
