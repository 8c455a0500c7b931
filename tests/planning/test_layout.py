"""Which layout will be possible: the class is asked with skeletons, of which one block may stand for all."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import pytest
import torch

from optimum_prune import InvalidConfig, PruningConfig
from optimum_prune.binding import bind
from optimum_prune.planning import layout
from optimum_prune.planning.layout import skeleton_of
from optimum_prune.planning.planner import make_plan
from optimum_prune.sizes import why_not_stock
from optimum_prune.surgery import slice_
from tests.models import VARIANTS, llama, opt, qwen2
from tests.pruned import unevenly

UNIFORM = {"scorer": "magnitude", "allocation": "uniform"}


def planned(model, **options):
    return make_plan(model, PruningConfig(**UNIFORM | options)).layout


@pytest.mark.parametrize("name", VARIANTS)
def test_stock_heads_are_those_of_the_whole_model(name):
    model = VARIANTS[name]()
    heads = [group.num_units for group in bind(model) if group.unit == "kv_group" and group.declared.default]
    found = make_plan(model, PruningConfig(scorer="magnitude", sparsity=0.5, units=["mlp_channel"])).layout.stock_heads
    assert found == {}
    if heads[0] == 1:
        return
    expected = []
    for count in range(1, heads[0] + 1):
        cut = VARIANTS[name]()
        for group in bind(cut):
            if group.unit == "kv_group" and group.declared.default:
                slice_(group, range(count))
        if why_not_stock(cut) is None:
            expected.append(count)
    found = planned(model, sparsity=0.5, units=["kv_group"]).stock_heads
    assert set(map(tuple, found.values())) == {tuple(expected)}


def test_llama_says_why():
    found = planned(llama(), sparsity=0.3)
    assert found.layout == "compact"
    assert found.reason == "The hidden size (32) is not a multiple of the number of attention heads (6)"
    assert found.stock_heads == {"model.layers": [1, 2, 4]}
    assert planned(qwen2(), sparsity=0.3).layout == "stock"


def test_opt_takes_no_other_heads():
    assert planned(opt(), sparsity=0.25).stock_heads == {"model.decoder.layers": [8]}
    found = make_plan(opt(), PruningConfig(scorer="magnitude", sparsity=0.5, allocation="global", units=["kv_group"]))
    assert (found.layout.layout, found.layout.reason) == ("compact", "OPTForCausalLM takes 8 kv_groups here")


def test_layers_that_must_differ():
    """11 channels over 3 layers: not the same number in each."""
    options = {"scorer": "magnitude", "allocation": "global", "units": ["mlp_channel"], "round_to": 1}
    uneven = make_plan(llama(), PruningConfig(sparsity=11 / 144, **options)).layout
    assert (uneven.layout, uneven.reason) == ("compact", "layers will differ in their mlp_channels")
    assert make_plan(llama(), PruningConfig(sparsity=12 / 144, **options)).layout.layout == "undecided"


def test_a_part_of_the_layers():
    found = planned(llama(), sparsity=0.5, units=["kv_group"], include=["*.1.*"])
    assert (found.layout, found.reason) == ("compact", "layers differ in num_key_value_heads, num_attention_heads")
    assert found.stock_heads == {"model.layers": [4]}


def test_a_pruned_model_stays_compact():
    found = planned(unevenly(qwen2()), sparsity=0.3, units=["mlp_channel"])
    assert found.layout == "compact" and "layers differ in" in str(found.reason)


def test_check_layout():
    plan = make_plan(llama(), PruningConfig(sparsity=0.3, **UNIFORM))
    plan.check_layout("auto")
    plan.check_layout("compact")
    with pytest.raises(InvalidConfig, match=r"'stock' is not possible: The hidden size .* kv_groups \[1, 2, 4\]"):
        plan.check_layout("stock")
    make_plan(llama(), PruningConfig(sparsity=0.5, **UNIFORM)).check_layout("stock")
    undecided = make_plan(llama(), PruningConfig(sparsity=0.5, scorer="magnitude", allocation="global"))
    with pytest.raises(InvalidConfig, match="is not certain: one ranking decides"):
        undecided.check_layout("stock")


def test_advice_on_the_layout_of_skipped_sublayers_can_be_followed():
    plan = make_plan(llama(), PruningConfig(pattern="layers", scorer="random", units=["mlp"], sparsity=0.34))
    with pytest.raises(InvalidConfig, match="layout='stock' is not possible") as error:
        plan.check_layout("stock")
    assert "allocation" not in str(error.value)  # which means nothing for this pattern


@pytest.mark.parametrize("name", VARIANTS)
def test_a_skeleton_is_the_model_without_weights(name):
    model = VARIANTS[name]().bfloat16()
    skeleton = skeleton_of(model)
    assert type(skeleton) is type(model) and {tensor.device.type for tensor in skeleton.state_dict().values()} == {
        "meta"
    }
    described = [
        {key: (tensor.shape, tensor.dtype) for key, tensor in m.state_dict().items()} for m in (model, skeleton)
    ]
    assert described[0] == described[1]
    assert skeleton.num_parameters() == model.num_parameters()  # ties are kept


def test_a_skeleton_copies_no_weight_out_of_a_hook():
    from accelerate import cpu_offload

    model = cpu_offload(llama(), execution_device=torch.device("cpu"))
    held = model.lm_head._hf_hook.weights_map
    assert skeleton_of(model).lm_head._hf_hook.weights_map is held


def test_one_block_stands_for_all_only_where_all_are_alike():
    assert len(layout._shallow(llama()).model.layers) == 1
    assert len(layout._shallow(unevenly(llama())).model.layers) == 3
