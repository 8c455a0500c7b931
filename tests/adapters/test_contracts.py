"""What every adapter owes, on every model of its type: a new adapter file is tested the moment it exists."""
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

import copy

import pytest
import torch
from torch import nn

from optimum_prune import registry
from optimum_prune.binding import adapter_for, bind, stacks
from optimum_prune.configs import stack_config
from optimum_prune.sizes import build_skeleton, describe_, measure
from optimum_prune.surgery import slice_
from tests.models import VARIANTS, every_model, inputs
from tests.outputs import outputs


@pytest.fixture(params=VARIANTS)
def model(request):
    return VARIANTS[request.param]()


def draw_cuts(model, seed=0):
    """Draw the kept units of every group: any number of them, different from layer to layer; ties are kept."""
    generator = torch.Generator().manual_seed(seed)
    cuts, counts, tied = [], {}, {}
    for group in bind(model):
        count = int(torch.randint(1, group.num_units + 1, (), generator=generator))
        if group.group.tied:
            count = counts.setdefault(group.stack, count)
        kept = torch.randperm(group.num_units, generator=generator)[:count].sort().values
        if group.group.tied == "units":
            kept = tied.setdefault(group.stack, kept)
        cuts.append(kept)
    return cuts


def _inputs(model, dtype):
    given = inputs(model, 3, 16)
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in given.items()}


def cut_(model, cuts):
    for group, kept in zip(bind(model), cuts, strict=True):
        slice_(group, kept)
    return model


def mask_(model, cuts):
    """Zero the readers' columns of every removed unit: the definition of what slicing has to equal."""
    for group, kept in zip(bind(model), cuts, strict=True):
        removed = torch.ones(group.num_units, dtype=torch.bool)
        removed[kept] = False
        for reader in group.readers:
            columns = reader.weight.data.view(len(reader.weight), group.num_units, -1)
            columns[:, removed] = 0
    return model


def test_every_adapter_has_a_model():
    types = {model.config.model_type for model in every_model().values()}
    assert types == set(registry.available("adapters"))


def test_an_adapter_is_named_like_its_file():
    for name in registry.available("adapters"):
        assert registry.load("adapters", name).model_type.replace("-", "_") == name


def test_declared_paths_resolve(model):
    adapter = adapter_for(model)
    assert [found.stack for found in stacks(model, adapter)] == list(adapter.stacks)
    for stack in adapter.stacks:
        blocks = model.get_submodule(stack.path)
        depth = stack.depth or "num_hidden_layers"
        assert isinstance(blocks, nn.ModuleList) and len(blocks) == getattr(stack_config(model.config, stack), depth)
        for block in blocks:
            for path in stack.sublayers.values():
                assert isinstance(block.get_submodule(path), nn.Module)
        for path, attributes in stack.first.items():
            first, second = (block.get_submodule(path) for block in blocks[:2])
            assert all(hasattr(first, name) for name in attributes)
            assert any(not hasattr(second, name) for name in attributes)


def test_declared_groups_resolve(model):
    for group in bind(model):
        block, declared = group.block, group.group
        assert isinstance(block.get_submodule(declared.site), nn.Module)
        for path in (*declared.writers, *declared.readers):
            assert isinstance(block.get_submodule(path), nn.Linear)
        width = block.get_submodule(declared.writers[0]).out_features
        for path in declared.width_attributes:
            parent, _, attribute = path.rpartition(".")
            assert getattr(block.get_submodule(parent), attribute) == width
        assert set(declared.counts.values()) <= set(declared.writers)
        assert next(iter(declared.counts.values())) == declared.writers[0]
        assert len(group.tables) == (len(declared.tables) if group.layer == 0 else 0)


def test_every_linear_of_a_block_is_declared(model):
    for found in stacks(model, adapter_for(model)):
        for layer, block in enumerate(found.blocks):
            declared = [
                linear
                for group in bind(model)
                if (group.stack, group.layer) == (found.path, layer)
                for linear in group.linears
            ]
            assert set(declared) == {module for module in block.modules() if isinstance(module, nn.Linear)}


def test_declared_counts_are_those_of_the_config(model):
    for stack in adapter_for(model).stacks:
        config = stack_config(model.config, stack)
        for counts in measure(model)[stack.path].values():
            assert counts == {name: getattr(config, name) for name in counts}
    for group in bind(model):
        assert group.num_units == next(iter(group.counts().values()))
        if group.group.unit_size_key:
            config = stack_config(model.config, group.declared)
            derived = config.hidden_size // config.num_attention_heads
            assert group.unit_size == (getattr(config, group.group.unit_size_key, None) or derived)


def test_keeping_all_changes_nothing(model):
    before = dict(model.named_parameters(remove_duplicate=False))
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cut_(model, [range(group.num_units) for group in bind(model)])
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_slicing_equals_masking(model, seed, dtype, tolerance):
    model.to(dtype)
    cuts = draw_cuts(model, seed)
    masked, sliced = mask_(copy.deepcopy(model), cuts), cut_(copy.deepcopy(model), cuts)
    with torch.no_grad():
        dense, expected, got = (m(**_inputs(model, dtype)).logits for m in (model, masked, sliced))
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()
    assert (got - dense).abs().max() > 0.01 * dense.abs().max()  # else the cut was no cut


def test_generates_alike_with_every_cache_alone_and_padded(model):
    describe_(cut_(model, draw_cuts(model)))
    got = outputs(model)
    for name in ("dynamic", "static", "alone"):
        assert torch.equal(got[name], got["uncached"]), name


@pytest.mark.parametrize("seed", range(2))
def test_parameters_are_as_many_as_the_counts_predict(model, seed):
    cuts, expected = draw_cuts(model, seed), model.num_parameters()
    for group, kept in zip(bind(model), cuts, strict=True):
        gone = 1 - len(kept) / group.num_units
        expected -= round(gone * sum(w.weight.numel() for w in group.linears))
        expected -= round(gone * sum(w.bias.numel() for w in group.writers if w.bias is not None))
        expected -= round(gone * sum(table.weight.numel() for table in group.tables))
    assert cut_(model, cuts).num_parameters() == expected


def test_only_declared_tensors_change_and_keep_the_right_rows(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    cuts = draw_cuts(model)
    expected = dict(before)
    for group, kept in zip(bind(model), cuts, strict=True):
        names = iter(group.linear_names)
        for writer in group.writers:
            name = next(names)
            for kind in ("weight", "bias") if writer.bias is not None else ("weight",):
                units = before[f"{name}.{kind}"].unflatten(0, (group.num_units, -1))
                expected[f"{name}.{kind}"] = units[kept].flatten(0, 1)
        for name in names:
            units = before[f"{name}.weight"].unflatten(1, (group.num_units, -1))
            expected[f"{name}.weight"] = units[:, kept].flatten(1, 2)
        for path in group.group.tables if group.layer == 0 else ():
            name = f"{group.stack}.0.{path}.weight"
            expected[name] = before[name][:, kept]
    after = cut_(model, cuts).state_dict()
    assert after.keys() == expected.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, expected[name]), name
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype_modes_and_ties_are_kept(model, dtype):
    model.to(dtype).train()
    frozen = {name for i, (name, _) in enumerate(model.named_parameters()) if i % 2}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    modules = {name: module.train("mlp" not in name) for name, module in model.named_modules()}
    names = set(model.state_dict())
    cut_(model, draw_cuts(model))
    assert dict(model.named_modules()) == modules  # the module objects themselves
    assert all(module.training == ("mlp" not in name) for name, module in modules.items())
    assert set(model.state_dict()) == names  # no bias came or went
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype and parameter.device.type == "cpu"
        assert parameter.requires_grad == (name not in frozen)
        assert parameter.grad is None and parameter.is_contiguous()
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


def test_a_skeleton_is_cut_on_its_device(model):
    skeleton = build_skeleton(type(model), model.config)
    cuts = draw_cuts(model)
    with torch.device("meta"):  # as transformers does while it loads
        cut_(skeleton, cuts)
    shapes = {name: tensor.shape for name, tensor in cut_(model, cuts).state_dict().items()}
    assert {name: tensor.shape for name, tensor in skeleton.state_dict().items()} == shapes
    assert all(parameter.is_meta for parameter in skeleton.parameters())


def test_counters_follow(model):
    cut_(model, draw_cuts(model))
    for group in bind(model):
        for linear in group.linears:
            assert (linear.out_features, linear.in_features) == linear.weight.shape
            assert linear.bias is None or len(linear.bias) == linear.out_features
        site = group.block.get_submodule(group.group.site)
        # What the forward reads; a class that has more of these must declare them.
        if hasattr(site, "intermediate_size"):
            assert site.intermediate_size == group.readers[0].in_features
        if hasattr(site, "num_key_value_groups"):
            assert site.num_key_value_groups == site.q_proj.out_features // site.k_proj.out_features
        if hasattr(site, "num_heads"):
            assert site.num_heads == site.q_proj.out_features // site.head_dim
