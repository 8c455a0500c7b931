"""Which weights become zero, and what the report says of it."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false

import copy
import json
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from optimum_prune import (
    CalibrationConfig,
    Pruner,
    PruningConfig,
    registry,
)
from optimum_prune.masks import removed_of
from optimum_prune.pipeline import prune
from optimum_prune.solvers import sparsegpt
from tests.models import llama, opt, t5, tokens
from tests.words import tokenizer
from tests.zeroed import (
    CALIBRATED,
    SAMPLES,
    SCORERS,
    assert_only_these_changed,
    bits,
    config,
    excluded,
    for_model,
    linears_of,
    removed,
    state,
    zeros,
)

# Repeatable


class TestRepeatable:
    """CASES.md 11."""

    @pytest.mark.parametrize("options", [config(), zeros()], ids=["2:4", "50 %"])
    @pytest.mark.parametrize("scorer", SCORERS)
    def test_the_same_seed_twice(self, options, scorer):
        models = [llama() for _ in range(2)]
        reports = [prune(model, replace(options, scorer=scorer)) for model in models]
        assert bits(models[0]) == bits(models[1])
        assert reports[0].fingerprint == reports[1].fingerprint

    def test_another_seed_draws_otherwise(self):
        models = [llama() for _ in range(2)]
        for seed, model in enumerate(models):
            prune(model, config(scorer="random", seed=seed))
        masks = [linear.weight == 0 for model in models for linear in linears_of(model).values()]
        half = len(masks) // 2
        assert not any(torch.equal(one, other) for one, other in zip(masks[:half], masks[half:], strict=True))

    @pytest.mark.parametrize("build", [llama, opt, t5])
    @pytest.mark.parametrize("options", [{}, {"pattern": "unstructured", "sparsity": 0.5}], ids=["2:4", "50 %"])
    @pytest.mark.parametrize("scorer", CALIBRATED)
    def test_any_batch_size_gives_the_same_masks(self, build, options, scorer):
        """Only the order of float32 sums differs, so only scores that are equal to 6 digits may change places."""
        pruned = []
        for size in (1, 3, 4, 6):
            model = build()
            data = uneven_pairs() if build is t5 else SAMPLES
            calibration = CalibrationConfig(data, num_samples=6, batch_size=size)
            prune(model, config(**options, scorer=scorer, calibration=calibration))
            pruned.append(linears_of(model))
        for linears in pruned[1:]:
            same = [(linears[name].weight == 0) == (linear.weight == 0) for name, linear in pruned[0].items()]
            assert sum(int((~mask).sum()) for mask in same) <= 2
            for name, linear in pruned[0].items():
                if torch.equal(linears[name].weight == 0, linear.weight == 0):
                    torch.testing.assert_close(linears[name].weight, linear.weight, rtol=1e-2, atol=1e-3)

    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("scorer", CALIBRATED)
    def test_padding_of_a_dataset_on_either_side(self, side, scorer):
        rows = {"input_ids": [], "attention_mask": []}
        for sample in SAMPLES:
            blank, ones = [0] * (12 - len(sample)), [1] * len(sample)
            rows["input_ids"].append(blank + sample if side == "left" else sample + blank)
            rows["attention_mask"].append(blank + ones if side == "left" else ones + blank)
        models = [llama() for _ in range(2)]
        # Tables draw their rows in another order than lists, and sums in another order may round differently.
        plain = CalibrationConfig(Dataset.from_dict({"input_ids": SAMPLES}), num_samples=len(SAMPLES))
        prune(models[0], config(scorer=scorer, calibration=plain))
        padded = CalibrationConfig(Dataset.from_dict(rows), num_samples=len(SAMPLES))
        prune(models[1], config(scorer=scorer, calibration=padded))
        assert bits(models[0]) == bits(models[1])

    def test_nothing_is_drawn_from_the_global_generator(self):
        before = torch.random.get_rng_state()
        for scorer in SCORERS:
            prune(llama(), config(scorer=scorer))
        assert torch.equal(torch.random.get_rng_state(), before)


def uneven_pairs() -> Dataset:
    return Dataset.from_dict(
        {"input_ids": SAMPLES, "labels": [row[: 3 + i] for i, row in enumerate(reversed(SAMPLES))]}
    )


# What is chosen


def all_inputs(model, name: str) -> Tensor:
    """What a linear reads, from every sample alone."""
    seen: list[Tensor] = []
    handle = linears_of(model)[name].register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for sample in SAMPLES:
            model(torch.tensor([sample]))
    handle.remove()
    return torch.cat(seen)


def by_loops(weight: Tensor, norm: Tensor, groups: int, remove: int) -> Tensor:
    """Keep all but the lowest `remove` of every `groups` consecutive |w| |x| of a row, in float64."""
    kept = []
    for row in weight.double().tolist():
        scores = [abs(w) * n for w, n in zip(row, norm.double().tolist(), strict=True)]
        for start in range(0, len(row), groups):
            gone = sorted(range(start, start + groups), key=lambda j: scores[j])[:remove]
            kept += [0.0 if j in gone else row[j] for j in range(start, start + groups)]
    return torch.tensor(kept).view(weight.shape)


class TestGolden:
    """Against plain loops in float64; SparseGPT and ADMM as solvers are tested beside them."""

    @pytest.mark.parametrize(
        ("pattern", "groups", "remove"), [("2:4", 4, 2), ("1:3", 3, 1), ("unstructured", None, 0.4)]
    )
    def test_wanda(self, pattern, groups, remove):
        model = llama(hidden_size=36, intermediate_size=60, num_attention_heads=6, num_key_value_heads=3, mlp_bias=True)
        dense = copy.deepcopy(model)
        sparsity = {"sparsity": remove} if groups is None else {}
        prune(model, config(pattern, scorer="wanda", **sparsity))
        for name, linear in linears_of(model).items():
            weight, width = linears_of(dense)[name].weight, linear.in_features
            norm = all_inputs(model, name).double().square().mean(dim=0).sqrt()  # of the pruned model's inputs
            gone = int(width * remove) if groups is None else remove
            assert torch.equal(linear.weight, by_loops(weight, norm, groups or width, gone)), name

    @pytest.mark.parametrize(("pattern", "groups", "remove"), [("2:4", 4, 2), ("3:5", 5, 3), ("row", None, 0.4)])
    def test_magnitude(self, pattern, groups, remove):
        model = llama(hidden_size=40, intermediate_size=60, head_dim=10)
        dense = copy.deepcopy(model)
        options = {"allocation": "row", "sparsity": remove} if groups is None else {}
        prune(model, config("unstructured" if groups is None else pattern, scorer="magnitude", **options))
        for name, linear in linears_of(model).items():
            weight, width = linears_of(dense)[name].weight, linear.in_features
            gone = int(width * remove) if groups is None else remove
            assert torch.equal(linear.weight, by_loops(weight, torch.ones(width), groups or width, gone))

    def test_sparsegpt_solves_with_the_inputs_of_the_pruned_model(self):
        model = llama(mlp_bias=True)
        dense = copy.deepcopy(model)
        prune(model, zeros(scorer="sparsegpt", sparsity=0.4))
        for name, linear in linears_of(model).items():
            x = all_inputs(model, name)
            (expected,), _ = sparsegpt([linears_of(dense)[name].weight], x.t() @ x / len(x), 0.4)
            torch.testing.assert_close(linear.weight.data, expected, rtol=1e-2, atol=1e-3)

    @pytest.mark.parametrize("scorer", ["magnitude", "random"])
    def test_one_ranking_over_all(self, scorer):
        model = llama()
        model.model.layers[1].mlp.up_proj.weight.data.mul_(1e-4)
        dense = copy.deepcopy(model)
        report = prune(model, zeros(scorer=scorer, sparsity=0.3, allocation="global"))
        total = sum(linear.weight.numel() for linear in linears_of(model).values())
        assert sum(map(removed, linears_of(model).values())) == removed_of(total, 0.3)
        assert report.achieved == pytest.approx(0.3, abs=1 / total)
        if scorer == "magnitude":
            assert not model.model.layers[1].mlp.up_proj.weight.any()
            weights = torch.cat([linear.weight.abs().flatten() for linear in linears_of(dense).values()])
            limit = weights.sort().values[removed_of(total, 0.3) - 1]
            for name, linear in linears_of(model).items():
                assert torch.equal(linear.weight == 0, linears_of(dense)[name].weight.abs() <= limit)
            assert "skipped" not in model.config.pruning_config  # a linear without weights is no skipped sub-layer

    def test_a_matrix_is_ranked_as_a_whole(self):
        model = llama()
        prune(model, zeros(scorer="wanda", allocation="matrix", sparsity=0.3))
        linears = linears_of(model).values()
        assert all(removed(linear) == removed_of(linear.weight.numel(), 0.3) for linear in linears)
        assert any(len((linear.weight == 0).sum(dim=1).unique()) > 1 for linear in linears)

    def test_a_better_scorer_moves_the_output_less(self):
        """The claim of the methods, on the model's own logits; the mean over seeds."""
        moved = dict.fromkeys(SCORERS, 0.0)
        for seed in range(4):
            dense = llama(seed, hidden_size=64, intermediate_size=96, initializer_range=0.1)
            rows = [tokens(1, 48, seed=100 * seed + i)[0].tolist() for i in range(16)]
            for scorer in SCORERS:
                model = copy.deepcopy(dense)
                prune(model, zeros(scorer=scorer, calibration=CalibrationConfig(rows, num_samples=16, seq_len=48)))
                with torch.no_grad():
                    there = tokens(8, 48, seed=99 + seed)
                    moved[scorer] += float((model(there).logits - dense(there).logits).square().mean())
        order = [moved[scorer] for scorer in ("admm", "sparsegpt", "wanda", "magnitude", "random")]
        assert order == sorted(order), moved


class TestTargets:
    def test_patterns_choose_single_linears(self):
        model = llama()
        before = state(model)
        report = prune(model, config(include=["model.layers.[02]", "*.o_proj"], exclude=["*.up_proj", "*.2.self_attn"]))
        left_out = ("1.self_attn.q", "1.self_attn.k", "1.self_attn.v", "1.mlp", "up_proj", "2.self_attn")
        names = [name for name in linears_of(model) if not any(part in name for part in left_out)]
        assert [group.name for group in report.groups] == names and "model.layers.1.self_attn.o_proj" in names
        assert_only_these_changed(model, before, names)

    def test_a_fraction_for_each_pattern(self):
        model = llama()
        before = state(model)
        shares = {
            "*.mlp": 0.75,
            "model.layers.0.self_attn": 0.25,
            "*.2.self_attn.v_proj": 0.5,  # two fractions of linears with one input
            "*.2.self_attn.k_proj": 0.75,
            "*.2.self_attn.q_proj": 0.0,
        }

        def share_of(name: str) -> float:
            if ".mlp." in name or name.endswith("2.self_attn.k_proj"):
                return 0.75
            return 0.25 if ".0." in name else 0.5 if name.endswith("2.self_attn.v_proj") else 0.0

        for scorer in CALIBRATED:
            model = llama()
            report = prune(model, zeros(scorer=scorer, sparsity=shares))
            for name, linear in linears_of(model).items():
                assert removed(linear) == share_of(name) * linear.weight.numel(), name
            counts = {group.name: group.before for group in report.groups}
            assert len(counts) == 9 + 4 + 3 and "model.layers.1.self_attn.q_proj" not in counts
            gone = sum(removed(linear) for linear in linears_of(model).values())
            assert report.asked == pytest.approx(report.achieved) == gone / sum(counts.values())
            assert_only_these_changed(
                model, before, [group.name for group in report.groups if group.after < group.before]
            )

    def test_no_order_of_the_mapping_matters(self):
        """config.json is written with sorted keys."""
        names = ["*.mlp", "*.self_attn", "model.layers.1.mlp.up_proj"]
        models = [llama() for _ in range(2)]
        for model, order in zip(models, (names, names[::-1]), strict=True):
            prune(model, zeros(scorer="wanda", sparsity={name: 0.25 if "attn" in name else 0.5 for name in order}))
        assert bits(models[0]) == bits(models[1])

    def test_the_recipe_in_the_config_gives_the_same_model(self, tmp_path):
        first, again = llama(), llama()
        shares = {"*.self_attn": 0.25, "*.0.mlp": 0.5, "*.1.mlp": 0.5}
        (tmp_path / "text.txt").write_text(" ".join(f"w{3 + i % 60}" for i in range(200)))
        data = CalibrationConfig(str(tmp_path / "text.txt"), num_samples=4, seq_len=16)
        prune(first, zeros(scorer="wanda", sparsity=shares, calibration=data), tokenizer=tokenizer())
        first.save_pretrained(tmp_path / "model")
        recipe = json.loads((tmp_path / "model" / "config.json").read_text())["pruning_config"]["recipe"]
        recipe["calibration"] = data.to_dict()  # of the path, only the last name is published
        prune(again, PruningConfig.from_dict(recipe), tokenizer=tokenizer())
        assert bits(first) == bits(again)

    def test_a_sparsity_of_zero_removes_nothing(self):
        for scorer in SCORERS:
            model = llama()
            before = bits(model)
            report = prune(model, zeros(scorer=scorer, sparsity=0.0))
            assert (report.asked, report.achieved) == (0.0, 0.0) and bits(model) == before

    def test_pruned_again(self):
        model = llama()
        first = prune(model, zeros(scorer="wanda", sparsity=0.25))
        report = prune(model, config(scorer="wanda"))
        assert report.previous == [first.record()] and report.achieved >= 0.5
        assert all(
            ((linear.weight.unflatten(1, (-1, 4)) == 0).sum(dim=2) >= 2).all() for linear in linears_of(model).values()
        )

    @pytest.mark.parametrize(
        "options", [{"scorer": "taylor"}, {"pattern": "layers", "scorer": "random", "sparsity": 0.34}]
    )
    def test_after_structured_pruning_of_another_kind(self, options):
        if options["scorer"] not in registry.available("scorers"):
            options = {"scorer": "magnitude"}
        model = llama()
        prune(model, PruningConfig(**{"sparsity": 0.3} | options))
        before = copy.deepcopy(model.config.to_dict())
        report = prune(model, config(scorer="wanda", exclude=excluded(model, 4)))
        after = model.config.to_dict()
        assert report.achieved == 0.5
        assert {**after, "pruning_config": 0} == {**before, "pruning_config": 0}


class TestPoorCalibration:
    """CASES.md 9."""

    @pytest.mark.parametrize("options", [{}, {"pattern": "unstructured", "sparsity": 0.5}], ids=["2:4", "50 %"])
    @pytest.mark.parametrize("scorer", CALIBRATED)
    def test_eight_tokens_for_64_columns(self, scorer, options):
        model = llama(hidden_size=64)
        data = CalibrationConfig([[5, 6, 7, 8], [9, 10, 11, 12]], num_samples=2)
        report = prune(model, config(**options, scorer=scorer, calibration=data))
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
        assert report.achieved == 0.5

    @pytest.mark.parametrize("options", [{}, {"pattern": "unstructured", "sparsity": 0.5}], ids=["2:4", "50 %"])
    @pytest.mark.parametrize("scorer", CALIBRATED)
    def test_a_dead_column_is_reported(self, scorer, options):
        model = llama()
        model.model.layers[1].input_layernorm.weight.data[7] = 0
        report = prune(model, config(**options, scorer=scorer))
        site = "model.layers.1.self_attn"
        names = ", ".join(f"{site}.{letter}_proj" for letter in "qkv")
        assert f"3.1% of the inputs of {names} are zero on all calibration tokens." in report.warnings
        assert len(report.warnings) == 1
        assert all(not linears_of(model)[f"{site}.{letter}_proj"].weight[:, 7].any() for letter in "qkv")
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
        assert report.achieved == pytest.approx(0.5, abs=0.01)

    def test_one_dead_column_of_many_is_no_news(self):
        model = llama(hidden_size=128, intermediate_size=48)
        model.model.layers[1].input_layernorm.weight.data[7] = 0
        assert prune(model, config(scorer="wanda")).warnings == []

    def test_a_damping_that_was_raised_names_the_linears(self, monkeypatch):
        monkeypatch.setattr(
            "optimum_prune.solvers.damped",
            lambda h: (h - 0.05 * h.diagonal().mean() * torch.eye(len(h)), h.diagonal() == 0),
        )
        report = prune(llama(), config(scorer="sparsegpt", calibration=CalibrationConfig([[5, 6, 7]], num_samples=1)))
        assert (
            "model.layers.0.mlp.gate_proj, model.layers.0.mlp.up_proj: the Hessian took a damping of 0.1 of its mean "
            "diagonal." in report.warnings
        )

    def test_a_layer_that_reads_nothing(self):
        """All its weights go, and nothing is taken for a skipped sub-layer."""
        model = llama()
        model.model.layers[1].mlp.up_proj.weight.data.zero_()
        report = prune(model, config(scorer="sparsegpt"))
        assert removed(model.model.layers[1].mlp.down_proj) == 32 * 48
        assert (
            "100.0% of the inputs of model.layers.1.mlp.down_proj are zero on all calibration tokens."
            in report.warnings
        )
        assert "skipped" not in model.config.pruning_config and report.achieved > 0.5


class TestReport:
    @pytest.mark.parametrize("scorer", SCORERS)
    def test_says_what_a_recount_says(self, scorer):
        model = t5()
        report = prune(model, zeros(scorer=scorer, sparsity=0.3, calibration=for_model(model, samples=8)))
        for group in report.groups:
            weight = linears_of(model)[group.name].weight
            assert (group.before, group.after) == (weight.numel(), int((weight != 0).sum()))
            assert (group.weights_before, group.weights_after, group.kept) == (group.before, group.after, [])
            assert group.unit == "weight"
        gone, total = (
            sum(f(linear) for linear in linears_of(model).values()) for f in (removed, lambda x: x.weight.numel())
        )
        assert report.achieved == pytest.approx(gone / total)
        assert report.parameters_before == report.parameters_after == model.num_parameters()
        for stack, units in report.per_stack.items():
            own = [linear for name, linear in linears_of(model).items() if name.startswith(stack)]
            assert list(units) == ["weight"] and units["weight"]["asked"] == 0.3
            gone = sum(map(removed, own)) / sum(linear.weight.numel() for linear in own)
            assert units["weight"]["achieved"] == pytest.approx(gone)

    def test_is_readable(self):
        model = llama(num_hidden_layers=5)
        lines = str(prune(model, config(scorer="wanda"))).splitlines()
        assert lines[0] == "2:4, wanda, row: asked 50.0%, achieved 50.0% of the targeted weights"
        assert lines[1:5] == [
            "layer     weight",
            "model.layers",
            "0          3840/7680  #####.....",
            "1          3840/7680  #####.....",
        ]
        assert lines[8:12] == [
            "all       19200/38400 #####.....",
            "asked     50.0%",
            "achieved  50.0%",
            "parameters 44,896 -> 44,896 (+0.0%)",
        ]

    def test_what_was_not_reached_is_explained(self):
        model = llama()
        prune(model, zeros(scorer="magnitude", sparsity=0.8))
        report = prune(model, config(scorer="magnitude"))
        assert report.achieved > 0.7
        assert any("asked 50.0%, achieved 8" in w and "some weights were zero before" in w for w in report.warnings)

    def test_zeros_alone_are_neither_smaller_nor_faster(self):
        """CASES.md 16."""
        pruner = Pruner(llama())
        pruner.evaluate(SAMPLES)
        pruner.prune(zeros(scorer="wanda"))
        pruner.evaluate(SAMPLES)
        rows = pruner.comparison().splitlines()
        (weights,) = [row for row in rows if row.startswith("weights")]
        (parameters,) = [row for row in rows if row.startswith("parameters")]
        assert weights.endswith("1.00x") and parameters.endswith("1.00x")
        assert any(row.startswith("decoding, per token") and row.endswith("x") for row in rows)  # measured, both
