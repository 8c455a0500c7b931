"""Learned masks: what they are worth, what they leave behind, and what is refused."""
# pyright: reportArgumentType=false, reportOptionalSubscript=false, reportOptionalIterable=false, reportAttributeAccessIssue=false

import copy
import json
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimum_prune import CalibrationConfig, InductionConfig, Pruner, PruningConfig
from optimum_prune.biases import add_, has_bias
from optimum_prune.calibration.data import load_samples
from optimum_prune.calibration.samples import CalibrationData
from optimum_prune.commands.command import OneLineParser
from optimum_prune.commands.flags import add_configs, read_config
from optimum_prune.comparing.naming import named
from optimum_prune.errors import CalibrationError, InvalidConfig, PruningError
from optimum_prune.induction import Gain, split
from optimum_prune.layerwise import Batch, Call
from optimum_prune.masking import find_mask_targets
from optimum_prune.masks import n_of_m_mask, removed_of, row_mask
from optimum_prune.pipeline import load_scorer, prune
from optimum_prune.report import PruningReport, describe_induction
from optimum_prune.scales import soft_mask
from optimum_prune.scaling import Candidate, Found, Passes, Shared, output, train_
from optimum_prune.solvers import sparsegpt, sparsegpt_masked
from tests import lab
from tests.lab.text import WINDOW
from tests.models import VARIANTS, inputs, llama, llava, mistral, opt, qwen2, source, t5
from tests.zeroed import bits, excluded, for_model, linears_of, removed, targeted

SAMPLES = 8
INDUCED = ["magnitude", "wanda", "sparsegpt"]


def induced(model, scorer: str = "magnitude", pattern: str = "2:4", **options: Any) -> PruningConfig:
    """Return a config for any variant that learns its masks."""
    given = {
        "sparsity": 0.5,
        "induction": InductionConfig(),
        "calibration": for_model(model, SAMPLES),
        "exclude": excluded(model, 4) if ":" in pattern else None,
    }
    return PruningConfig(pattern=pattern, scorer=scorer, **given | options)


def data_of(model, config: PruningConfig) -> CalibrationData:
    return load_samples(config.calibration, model)


def held_out_of(model, config: PruningConfig) -> list[Batch]:
    sequences = split(data_of(model, config), config.induction, config.seed)
    return sequences.batches[sequences.training :]


def blocks_of(model) -> list[str]:
    """Return the paths of all blocks that are pruned by default, in the order of the data."""
    return list(dict.fromkeys(group.block for group in candidates(model)))


def candidates(model) -> list[Any]:
    config = PruningConfig(pattern="unstructured", sparsity=0.5, scorer="magnitude")
    targets = find_mask_targets(model, config, load_scorer(config))
    return [targets._candidate(target) for target in targets.targets]


def calls_of(model, block: str, batches) -> list[Call]:
    """What a block of a model is given."""
    seen: list[Call] = []
    handle = model.get_submodule(block).register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(Call(args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        for batch in batches:
            model(**batch, use_cache=False)
    handle.remove()
    return seen


@torch.no_grad()
def difference(block: nn.Module, dense: nn.Module, calls: list[Call]) -> float:
    errors = [(output(block, call) - output(dense, call)).double().square() for call in calls]
    return (sum(e.sum() for e in errors) / sum(e.numel() for e in errors)).item()


class TestNeverWorse:
    """The guarantee: on what is held out, every block is at least as near to the dense block as the scorer's own."""

    @pytest.mark.parametrize(
        ("name", "scorer", "pattern"),
        [(name, INDUCED[i % 3], ("unstructured", "2:4")[i % 2]) for i, name in enumerate(VARIANTS)]
        + [("t5", "wanda", "2:4"), ("llama-gqa", "wanda", "2:4"), ("llama-gqa", "sparsegpt", "unstructured")],
    )
    def test_block_by_block(self, name, scorer, pattern):
        """Each block is pruned again by the scorer alone, behind the blocks that were pruned before it."""
        dense, model, mixed = (VARIANTS[name]().eval() for _ in range(3))
        config = induced(model, scorer, pattern)
        alone = replace(config, induction=None)
        report = prune(model, config)
        held_out = held_out_of(dense, config)
        blocks = blocks_of(dense)
        assert [row["block"] for row in report.induction] == blocks
        for row in report.induction:
            block = row["block"]
            base = copy.deepcopy(mixed)
            prune(base, replace(alone, include=[block], exclude=exclusions(config, block)))
            calls = calls_of(mixed, block, held_out)
            ours, theirs = (
                difference(m.get_submodule(block), dense.get_submodule(block), calls) for m in (model, base)
            )
            assert ours <= theirs * 1.0001
            assert row["kept"] == (row["induced"] < row["base"])
            assert row["base"] == pytest.approx(theirs, rel=1e-2)  # other sums of the same inputs
            assert ours == pytest.approx(min(row["induced"], row["base"]), rel=1e-3)
            mixed.get_submodule(block).load_state_dict(model.get_submodule(block).state_dict())

    @pytest.mark.parametrize("name", VARIANTS)
    def test_with_biases_that_it_may_create(self, name):
        """As above, in all blocks that were given any, or not."""
        dense, model, mixed = (VARIANTS[name]().eval() for _ in range(3))
        config = induced(model, "wanda", "unstructured", induction=InductionConfig(epochs=1, allow_bias=True))
        report = prune(model, config)
        held_out = held_out_of(dense, config)
        for row in report.induction:
            base, calls = copy.deepcopy(mixed), calls_of(mixed, block := row["block"], held_out)
            prune(base, replace(config, induction=None, include=[block]))
            theirs, ours = (
                difference(m.get_submodule(block), dense.get_submodule(block), calls) for m in (base, model)
            )
            assert ours <= theirs * 1.0001
            assert ours == pytest.approx(min(row["induced"], row["base"]), rel=1e-3)
            assert row["kept"] or not (row["shifted"] or row["created"])
            for path, module in model.get_submodule(block).named_modules():
                if isinstance(module, nn.Linear) and has_bias(module):
                    add_(mixed.get_submodule(f"{block}.{path}"))
            mixed.get_submodule(block).load_state_dict(model.get_submodule(block).state_dict())

    def test_where_nothing_is_gained_the_scorers_own_masks_stay(self, monkeypatch):
        monkeypatch.setattr("optimum_prune.induction.train_", lambda *_: Found())
        model, plain = opt(), opt()
        report = prune(model, induced(model, "wanda", induction=InductionConfig(batch_size=1)))
        prune(plain, replace(induced(plain, "wanda"), induction=None, calibration=in_order(plain)))
        assert bits(model) == bits(plain)
        assert "0 of 3 blocks gained" in str(report)

    def test_the_best_epoch_is_kept(self, monkeypatch):
        model = llama()
        shared, passes = alone(model)
        losses = iter([3.0, 1.0, 2.0])
        seen: list[dict[str, Tensor]] = []

        def loss(_):
            seen.append({name: member.linear.weight != 0 for name, member in shared.members.items()})
            return next(losses)

        monkeypatch.setattr(Passes, "loss", loss)
        with torch.no_grad():
            best = train_([shared], passes, passes, 1.0, InductionConfig(epochs=3, learning_rate=1.0), 0)
        assert best.loss == 1.0 and best.deltas is None
        assert all(torch.equal(best.masks[name], seen[1][name]) for name in best.masks)
        assert any(not torch.equal(best.masks[name], seen[2][name]) for name in best.masks)


def exclusions(config: PruningConfig, block: str) -> list[str] | None:
    return [name for name in config.exclude or () if name.startswith(f"{block}.")] or None


def in_order(model) -> CalibrationConfig:
    """Return the data one by one, in the order in which induction reads it, so that sums are equal to the bit."""
    config = induced(model, induction=InductionConfig(batch_size=1))
    sequences = split(data_of(model, config), config.induction, config.seed)
    rows = [batch["input_ids"][0].tolist() for batch in sequences.batches]
    return replace(config.calibration, source=rows, batch_size=1)


def alone(model, pool: int | None = None) -> tuple[Shared, Passes]:
    """One linear of a block, to be trained without a driver."""
    block = model.model.layers[0]
    dense = copy.deepcopy(block)
    calls = calls_of(model, "model.layers.0", [inputs(model, seed=i) for i in range(4)])
    with torch.no_grad():
        passes = Passes(block, calls, [output(dense, call) for call in calls])
    linear = block.mlp.gate_proj
    choose = (lambda s: n_of_m_mask(s, 2, 4)) if pool == 4 else (lambda s: row_mask(s, s.shape[1] // 2))
    width = linear.in_features
    member = Candidate("model.layers.0", linear, choose, pool or width)
    biases = {} if linear.bias is None else {"gate": linear.bias.detach().clone()}
    weights = {"gate": linear.weight.detach().clone()}
    root, mean, spread = torch.rand(width) + 0.5, torch.randn(width), torch.rand(width) + 0.5
    return Shared({"gate": member}, weights, biases, root, mean, spread), passes


@pytest.fixture
def learned_wins(monkeypatch):
    """Every loss is lower than the one before, so that the learned masks stay."""
    losses = count(1e6, -1)
    monkeypatch.setattr(Passes, "loss", lambda _: next(losses))


@pytest.mark.usefixtures("learned_wins")
class TestMasks:
    @pytest.mark.parametrize(
        ("scorer", "allocation"),
        [("magnitude", "row"), ("magnitude", "matrix"), ("wanda", "row"), ("wanda", "matrix"), ("sparsegpt", "auto")],
    )
    def test_exact_counts(self, scorer, allocation):
        model = llama()
        report = prune(model, induced(model, scorer, "unstructured", sparsity=0.3, allocation=allocation))
        assert all(row["kept"] for row in report.induction)
        for linear in linears_of(model).values():
            rows, width = linear.weight.shape
            if allocation == "row":
                assert ((linear.weight == 0).sum(dim=1) == removed_of(width, 0.3)).all()
            elif allocation == "matrix":
                assert removed(linear) == removed_of(rows * width, 0.3)
            else:
                assert removed(linear) == removed_of(rows * width, 0.3)

    @pytest.mark.parametrize("scorer", INDUCED)
    @pytest.mark.parametrize(("pattern", "n", "m"), [("2:4", 2, 4), ("1:8", 1, 8)])
    def test_n_of_m(self, scorer, pattern, n, m):
        model = llama()
        report = prune(model, induced(model, scorer, pattern, sparsity=None))
        assert all(row["kept"] for row in report.induction)
        for linear in linears_of(model).values():
            assert ((linear.weight.unflatten(1, (-1, m)) == 0).sum(dim=2) == n).all()

    def test_weights_that_stay_are_as_they_were(self):
        model, dense = llama(), llama()
        prune(model, induced(model, "si"))
        for name, linear in linears_of(model).items():
            kept = linear.weight != 0
            assert torch.equal(linear.weight, linears_of(dense)[name].weight * kept + 0.0)

    @pytest.mark.parametrize("scorer", ["magnitude", "wanda"])
    @pytest.mark.parametrize("allocation", ["row", "matrix"])
    def test_training_starts_at_the_scorers_own_masks(self, scorer, allocation):
        """With steps of nothing, the learned masks are those of the scorer."""
        model, plain = llama(), llama()
        still = InductionConfig(batch_size=1, learning_rate=1e-12)
        config = induced(model, scorer, "unstructured", allocation=allocation, induction=still)
        report = prune(model, config)
        prune(plain, replace(config, induction=None, calibration=in_order(plain)))
        assert all(row["kept"] for row in report.induction) and bits(model) == bits(plain)

    def test_solved_weights_need_no_bias(self):
        model, dense = opt(), opt()
        prune(model, induced(model, "sparsegpt"))
        for name, linear in targeted(model).items():
            assert torch.equal(linear.bias, targeted(dense)[name].bias)

    def test_a_fraction_for_each_pattern(self):
        model = llama()
        prune(model, induced(model, "wanda", "unstructured", sparsity={"*.k_proj": 0.25, "*.q_proj": 0.5}))
        for name, linear in linears_of(model).items():
            share = 0.25 if "k_proj" in name else 0.5 if "q_proj" in name else 0
            assert removed(linear) == linear.weight.numel() * share

    def test_given_masks_are_solved_as_sparsegpt_solves_its_own(self):
        weights = [torch.randn(6, 160, generator=torch.Generator().manual_seed(i)) for i in range(2)]
        x = torch.randn(400, 160, generator=torch.Generator().manual_seed(9))
        hessian = x.t() @ x / len(x)
        for n_of_m in (None, (2, 4)):
            solved, _ = sparsegpt(weights, hessian, 0.5, n_of_m)
            again = sparsegpt_masked(weights, hessian, [weight != 0 for weight in solved])
            for one, other in zip(solved, again, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class TestTraining:
    @pytest.mark.parametrize("pool", [None, 4])
    def test_gradients_go_straight_through(self, pool):
        """Those of the loss in the hard mask, by autograd through the block, times the soft mask's in theta.

        And those of the offset, which the loss itself has.
        """
        model = llama(mlp_bias=True).double()
        shared, passes = alone(model, pool)
        shared.theta = torch.randn(32, generator=torch.Generator().manual_seed(1)) * 0.3
        shared.offset = torch.randn(32, generator=torch.Generator().manual_seed(2)) * 0.3
        masks = shared.masks()
        with torch.no_grad():
            shared.write_(masks, shared.delta)
        linear, weight = shared.members["gate"].linear, shared.weights["gate"]
        mask = masks["gate"].double().requires_grad_()
        offset = shared.offset.double().requires_grad_()
        delta = shared.mean + shared.spread * offset
        shift = ((weight * (1 - mask)) @ delta) + shared.biases["gate"]
        call, target = passes.given[0], passes.targets[0]
        parameters = {"mlp.gate_proj.weight": weight * mask, "mlp.gate_proj.bias": shift}
        returned = torch.func.functional_call(passes.block, parameters, call.args, call.kwargs)
        of_mask, of_offset = torch.autograd.grad((returned - target).square().mean(), [mask, offset])

        theta = shared.theta.clone().requires_grad_()
        soft = soft_mask(weight, shared.root, theta, masks["gate"], shared.members["gate"].pool, 0.3)
        (expected,) = torch.autograd.grad((soft * of_mask).sum(), theta)
        model.requires_grad_(False)
        linear.weight.requires_grad_(True)
        linear.bias.requires_grad_(True)
        found = passes.gradients(0, shared.parameters)
        gradients = dict(zip(shared.parameters, found, strict=True))
        got = shared.gradient(masks, gradients, 0.3)
        torch.testing.assert_close(got.double(), expected.double(), rtol=1e-4, atol=1e-7)
        got = shared.offset_gradient(masks, gradients)
        torch.testing.assert_close(got.double(), of_offset.double(), rtol=1e-4, atol=1e-7)

    def test_the_bias_starts_by_keeping_what_the_mean_input_adds(self):
        linear = nn.Linear(8, 5)
        x = torch.randn(64, 8) + 3
        dense = linear(x).mean(dim=0)
        weight, bias = linear.weight.detach().clone(), linear.bias.detach().clone()
        member = Candidate("", linear, lambda s: row_mask(s, 4), 8)
        shared = Shared({"a": member}, {"a": weight}, {"a": bias}, torch.ones(8), x.mean(dim=0), torch.ones(8))
        with torch.no_grad():
            shared.write_(shared.masks(), shared.delta)
        assert (linear.weight == 0).sum() == 20 and not torch.equal(linear.bias, bias)
        torch.testing.assert_close(linear(x).mean(dim=0), dense)
        with torch.no_grad():
            shared.write_(shared.masks(), None)
        assert (linear.weight == 0).sum() == 20 and torch.equal(linear.bias, bias)

    def test_scales_are_centred_and_bounded(self):
        shared, _ = alone(llama())
        shared.theta = torch.randn(32) * 3 + 5
        shared.centre_(1.5)
        assert shared.theta.abs().max() == 1.5 and abs(shared.theta.mean()) < 0.5

    @pytest.mark.usefixtures("learned_wins")
    def test_a_spectral_term_takes_part(self):
        models = [llama() for _ in range(2)]
        for model, weight in zip(models, (0.0, 1e4), strict=True):
            induction = InductionConfig(spectral=weight, epochs=1)
            prune(model, induced(model, "magnitude", "unstructured", induction=induction))
        assert bits(models[0]) != bits(models[1])

    def test_the_same_seed_twice_and_another(self):
        models = [llama() for _ in range(3)]
        reports = [prune(model, induced(model, seed=seed)) for model, seed in zip(models, (0, 0, 1), strict=True)]
        assert bits(models[0]) == bits(models[1]) and reports[0].induction == reports[1].induction
        assert reports[0].fingerprint == reports[1].fingerprint
        assert bits(models[0]) != bits(models[2])

    def test_nothing_is_drawn_from_the_global_generator(self):
        before = torch.random.get_rng_state()
        model = llama()
        prune(model, induced(model))
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_what_is_held_out_is_not_trained_on(self):
        data = CalibrationData([torch.tensor([i]) for i in range(1, 18)], 1, "numbers")
        for seed in (0, 1):
            found = split(data, InductionConfig(held_out=0.25, batch_size=3), seed)
            parts = [
                [row.item() for batch in part for row in batch["input_ids"]] for part in found.parts(found.batches)
            ]
            assert sorted([*parts[0], *parts[1]]) == [*range(1, 18)] and len(parts[1]) == 4

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("build", [llama, opt, t5])
    def test_half_precision(self, build, dtype):
        model = build().to(dtype)
        if build is t5:
            for layer in model.decoder.block:
                layer.layer[2].DenseReluDense.wo.float()
        dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        report = prune(model, induced(model, "magnitude", "2:4"))
        assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == dtypes
        assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())
        assert report.achieved == 0.5 and any(row["kept"] for row in report.induction)


class TestWhatIsLeft:
    @pytest.mark.parametrize("build", [llama, opt, t5, llava])
    def test_nothing_of_it(self, build):
        model = build().train()
        model.get_input_embeddings().weight.requires_grad_(False)
        next(iter(targeted(model).values())).weight.requires_grad_(False)
        names = [name for name, _ in model.named_modules()]
        parameters = {name: (p.requires_grad, p.shape, id(p)) for name, p in model.named_parameters()}
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        prune(model, induced(model, "wanda"))
        assert [name for name, _ in model.named_modules()] == names
        assert {name: (p.requires_grad, p.shape, id(p)) for name, p in model.named_parameters()} == parameters
        assert all(p.grad is None for p in model.parameters())
        modules = list(model.modules())
        assert all(module.training for module in modules)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in targeted(model).values())
        assert not any(m._forward_pre_hooks for m in modules)
        changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
        linears = [*targeted(model)]
        assert changed <= {f"{name}.{kind}" for name in linears for kind in ("weight", "bias")}
        assert any(name.endswith("bias") for name in changed) == (build is opt)

    def test_saved_and_loaded_by_plain_transformers(self, tmp_path):
        model = opt()
        prune(model, induced(model, "si"))
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path)
        assert bits(model) == bits(again)

    def test_a_trial_puts_biases_back_too(self):
        model = opt()
        before = bits(model)
        config = induced(model, "wanda")
        scorer = load_scorer(config)
        targets = find_mask_targets(model, config, scorer)
        with targets.trial(model, scorer, data_of(model, config), config):
            biases = [name for name, was in bits(model).items() if was != before[name] and name.endswith("bias")]
        assert biases and bits(model) == before and targets.gains == []

    @pytest.mark.parametrize("after", [1, 9])
    def test_an_interruption_is_named(self, monkeypatch, after):
        model = llama()
        wanted = {name: p.requires_grad for name, p in model.named_parameters()}
        real, calls = Passes.gradients, count(1)

        def gradients(*args):
            if next(calls) == after:
                raise KeyboardInterrupt
            return real(*args)

        monkeypatch.setattr(Passes, "gradients", gradients)
        with pytest.raises(PruningError, match="interrupted between the first cut and the last"):
            prune(model, induced(model))
        assert not any(m._forward_pre_hooks for m in model.modules())
        assert {name: p.requires_grad for name, p in model.named_parameters()} == wanted


class TestCreatedBiases:
    CONSENT = InductionConfig(epochs=1, allow_bias=True)

    @pytest.mark.usefixtures("learned_wins")
    def test_every_linear_gets_one_where_that_helps(self):
        model, dense = qwen2(), qwen2()
        model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
        report = prune(model, induced(model, "wanda", induction=self.CONSENT))
        assert [(row["shifted"], row["created"]) for row in report.induction] == [(3, 4)] * 3
        assert "dense block, 9 biases shifted, 12 biases created" in " ".join(map(str.strip, str(report).splitlines()))
        for name, linear in linears_of(model).items():
            before = linears_of(dense)[name]
            assert linear.bias.abs().max() > 0 and linear.bias.requires_grad == linear.weight.requires_grad
            assert before.bias is None or not torch.equal(linear.bias, before.bias)
        assert report.parameters_after - report.parameters_before == sum(
            len(linear.bias) for name, linear in linears_of(model).items() if linears_of(dense)[name].bias is None
        )

    @pytest.mark.usefixtures("learned_wins")
    def test_only_targets_and_their_kind(self):
        """Mistral says by linear who has one; of Llama all of a kind do, with zeros where nothing was pruned."""
        include = ["model.layers.1.mlp.up_proj"]
        mlps = [f"model.layers.{layer}.mlp.{kind}_proj" for layer in range(3) for kind in ("gate", "up", "down")]
        for build, expected in ((mistral, include), (llama, mlps)):
            model = build()
            prune(model, induced(model, "wanda", include=include, exclude=None, induction=self.CONSENT))
            given = {name: linear.bias for name, linear in linears_of(model).items() if linear.bias is not None}
            assert {*given} == {*expected}
            assert [name for name, bias in given.items() if bias.any()] == include

    def test_none_where_they_do_not_help(self, monkeypatch):
        """Losses of a block: of the scorer's masks, of learned masks, and of these with biases."""
        losses = iter([3.0, 1.0, 2.0] * 3)
        monkeypatch.setattr(Passes, "loss", lambda _: next(losses))
        model = llama()
        report = prune(model, induced(model, "wanda", induction=self.CONSENT))
        assert all(row["kept"] and row["created"] == 0 for row in report.induction)
        assert bits(model).keys() == bits(llama()).keys() and model.config.mlp_bias is False

    def test_none_of_blocks_that_gain_nothing(self, monkeypatch):
        monkeypatch.setattr("optimum_prune.induction.train_", lambda *_: Found())
        model = mistral()
        prune(model, induced(model, "wanda", induction=self.CONSENT))
        assert bits(model).keys() == bits(mistral()).keys()
        assert "quantization_config" not in model.config.to_dict()

    @pytest.mark.usefixtures("learned_wins")
    def test_none_without_consent(self):
        for build in (qwen2, llama, t5):
            model = build()
            prune(model, induced(model, "wanda"))
            assert bits(model).keys() == bits(build()).keys()

    @pytest.mark.usefixtures("learned_wins")
    def test_a_trial_takes_them_away(self):
        model = mistral()
        before, written = bits(model), model.config.to_dict()
        config = induced(model, "wanda", induction=self.CONSENT)
        scorer = load_scorer(config)
        targets = find_mask_targets(model, config, scorer)
        with targets.trial(model, scorer, data_of(model, config), config):
            assert len(bits(model)) > len(before)
        assert bits(model) == before and model.config.to_dict() == written

    @pytest.mark.parametrize(("build", "biased"), [(opt, True), (mistral, False)])
    def test_deltas_are_learned(self, build, biased):
        """They leave the mean, and the loss of what was trained on gets lower by them."""
        config = induced(build(), "wanda", induction=InductionConfig(epochs=2, allow_bias=not biased))
        gains = []
        for still in (True, False):
            model = build()
            with pytest.MonkeyPatch.context() as patch:
                if still:
                    patch.setattr(Shared, "offset_gradient", lambda self, *_: torch.zeros_like(self.offset))
                gains.append(prune(model, config).induction)
        assert sum(row["induced"] for row in gains[1]) < sum(row["induced"] for row in gains[0])


class TestReport:
    def test_gains(self):
        model = llama()
        report = prune(model, induced(model))
        gained = sum(row["kept"] for row in report.induction)
        assert f"induction: {gained} of 3 blocks gained, median " in str(report)
        again = PruningReport.from_dict(json.loads(json.dumps(report.to_dict())))
        assert again.induction == report.induction and str(again) == str(report)
        recipe = PruningConfig.from_dict(model.config.pruning_config["recipe"] | {"calibration": {}})
        assert recipe.induction == InductionConfig()

    def test_in_the_names_of_a_comparison(self):
        settings = [
            PruningConfig(pattern="2:4", scorer=scorer, induction=induction)
            for scorer, induction in [("wanda", None), ("si", None), ("wanda", {}), ("wanda", {"epochs": 3})]
        ]
        assert [name for name, _ in named(settings)] == ["wanda", "si", "wanda induction", "wanda induction=epochs:3"]

    def test_from_the_command_line(self):
        parser = OneLineParser()
        parser.add_argument("--recipe")
        add_configs(parser)
        base = ["--pattern", "2:4", "--scorer", "magnitude"]
        assert read_config(parser.parse_args(base)).induction is None
        given = read_config(parser.parse_args([*base, "--induction-epochs", "3", "--induction-held-out", "0.25"]))
        assert given.induction == InductionConfig(epochs=3, held_out=0.25)
        given = read_config(parser.parse_args([*base, "--induction-allow-bias"]))
        assert given.induction == InductionConfig(allow_bias=True)

    def test_in_words(self):
        rows = [Gain("a", 1.0, 0.5), Gain("b", 1.0, 3.0), Gain("c", 2.0, 1.6)]
        words = describe_induction([row.to_dict() for row in rows])
        assert words.startswith("induction: 2 of 3 blocks gained, median -20.0% held-out difference")

    def test_none_without_it(self):
        model = llama()
        report = prune(model, replace(induced(model, "wanda"), induction=None))
        assert report.induction is None and "induction" not in str(report)

    def test_losses_that_are_not_finite_are_no_gain_and_valid_json(self):
        row = Gain("a", float("inf"), float("nan")).to_dict()
        biases = {"shifted": 0, "created": 0}
        assert row == {"block": "a", "base": None, "induced": None, "kept": False} | biases

    def test_si_is_wanda_with_it(self):
        models = [llama() for _ in range(2)]
        prune(models[0], induced(models[0], "wanda"))
        report = prune(models[1], replace(induced(models[1], "si"), induction=None))
        assert report.config["induction"]["epochs"] == 2
        assert bits(models[0]) == bits(models[1])


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"scorer": "admm"},
                "induction has no meaning with scorer 'admm'.*'magnitude', 'wanda', 'sparsegpt', 'si'",
            ),
            ({"scorer": "random"}, "induction has no meaning with scorer 'random'"),
            ({"pattern": "structured"}, "induction=.* has no meaning with pattern 'structured'"),
            ({"pattern": "layers", "scorer": "random"}, "induction=.* has no meaning with pattern 'layers'"),
            ({"allocation": "global"}, "induction has no meaning with allocation='global'.*'row' or 'matrix'"),
            ({"induction": 3}, "induction must be a InductionConfig or a mapping, got 3"),
            ({"induction": {"epochs": 0}}, "epochs must be an integer >= 1, got 0"),
            ({"induction": {"held_out": 1.0}}, "held_out must be a number > 0 and < 1, got 1.0"),
            ({"induction": {"bound": 1}}, "bound must be a finite number > 1, got 1"),
            ({"induction": {"spectral": -1}}, "spectral must be a finite number >= 0, got -1"),
            ({"induction": {"allow_bias": 1}}, "allow_bias must be True or False, got 1"),
            (
                {"scorer": "sparsegpt", "induction": {"allow_bias": True}},
                "induction.allow_bias has no meaning with scorer 'sparsegpt'.*choose 'wanda' or 'magnitude'",
            ),
            ({"induction": {"learning_rte": 1}}, "Unknown InductionConfig field 'learning_rte'.*learning_rate"),
        ],
    )
    def test_configs(self, options, message):
        base = {"pattern": "unstructured", "scorer": "magnitude", "sparsity": 0.5, "induction": {}}
        with pytest.raises(InvalidConfig, match=message):
            PruningConfig(**base | options)

    def test_one_sequence(self):
        model = llama()
        before = bits(model)
        data = CalibrationConfig(source(model, 1), num_samples=1, seq_len=12)
        with pytest.raises(CalibrationError, match=r"holds out others; .* gives 1"):
            prune(model, induced(model, calibration=data))
        assert bits(model) == before

    def test_two_sequences_will_do(self):
        model = llama()
        prune(model, induced(model, calibration=for_model(model, 2)))

    def test_si_prunes_no_units(self):
        model = llama()
        with pytest.raises(InvalidConfig, match="'si' ranks for pattern 'unstructured', 'n:m'"):
            prune(model, PruningConfig(scorer="si", sparsity=0.5))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"pattern": "unstructured", "sparsity": 0.5}),
        ("llama", {"pattern": "2:4"}),
        ("t5", {"pattern": "2:4"}),
    ],
)
def test_a_trained_model_is_nearer_to_itself_with_learned_masks(name, options):
    """The claim of the method: the perplexity on text that nothing was trained or calibrated on."""
    found = {}
    for induction in (None, InductionConfig()):
        pruner = Pruner.from_pretrained(lab.folder(name))
        data = CalibrationConfig(lab.calibration(name), num_samples=32, seq_len=WINDOW)
        pruner.prune(PruningConfig(scorer="magnitude", calibration=data, induction=induction, **options))
        measured = pruner.evaluate(lab.evaluation(name), num_samples=32, seq_len=WINDOW, latency=False)
        found[induction] = measured.perplexity
    assert found[InductionConfig()] < found[None]
