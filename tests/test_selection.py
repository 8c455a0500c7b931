"""The choice of a calibration batch by the KL to the dense model, and pruning on trial."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false
# pyright: reportOperatorIssue=false

import copy
import json
import math
from dataclasses import replace

import pytest
import torch

from optimum_prune import (
    CalibrationConfig,
    CalibrationError,
    InvalidConfig,
    PruningConfig,
    UnsupportedModel,
    masking,
    selection,
)
from optimum_prune.calibration.data import load_samples
from optimum_prune.calibration.passages import passages
from optimum_prune.pipeline import FIND_TARGETS, load_scorer, prune
from optimum_prune.planning.planner import make_plan
from optimum_prune.selection import select, widened
from tests.models import VARIANTS, inputs, llama, llava, source, t5, with_scaled_logits
from tests.scorers.plain import forward
from tests.shallow import SUBLAYERS

SIZE, CANDIDATES, LENGTH = 2, 4, 12
HELD_OUT = 3
SAMPLES = SIZE * CANDIDATES + HELD_OUT
WAYS = {
    "structured": {"pattern": "structured", "scorer": "taylor", "sparsity": 0.3, "round_to": 2},
    "structured, compensated": {
        "scorer": "ntk",
        "compensation": "least_squares",
        "sparsity": 0.3,
        "pattern": "structured",
    },
    "mlp alone": {"pattern": "structured", "scorer": "afr", "sparsity": 0.3},
    "dropped": {"pattern": "layers", "sparsity": 0.4, "keep_first": 0, "keep_last": 0},
    "skipped": {"pattern": "layers", "units": ["mlp"], "sparsity": 0.4, "keep_first": 0, "keep_last": 0},
    "unstructured": {"pattern": "unstructured", "scorer": "wanda", "sparsity": 0.5},
    "2:4": {"pattern": "2:4", "scorer": "sparsegpt"},
}


def deep():
    return llama(num_hidden_layers=8)


CASES = [
    *((deep if "layers" in options["pattern"] else llama, way) for way, options in WAYS.items()),
    *((t5, way) for way in ("structured", "dropped", "unstructured")),
    *((llava, way) for way in ("structured", "2:4")),
]
NAMES = [f"{build.__name__}-{way}" for build, way in CASES]


@pytest.fixture(autouse=True)
def few_held_out_tokens(monkeypatch):
    monkeypatch.setattr(selection, "HELD_OUT", HELD_OUT * LENGTH)


def config_for(model, way="structured", samples=40, **calibration) -> PruningConfig:
    data = CalibrationConfig(
        source(model, samples, LENGTH),
        **{"num_samples": SIZE, "seq_len": LENGTH, "selection": "kl", "candidates": CANDIDATES} | calibration,
    )
    return PruningConfig(calibration=data, **WAYS[way])


def drawn(model, config):
    """Return what is drawn: candidate after candidate, then what is held out."""
    return load_samples(replace(config.calibration, num_samples=SAMPLES), model, default_seq_len=LENGTH)


def parts(data):
    candidates = [data.part(range(i * SIZE, (i + 1) * SIZE)) for i in range(CANDIDATES)]
    return candidates, data.part(range(SIZE * CANDIDATES, SAMPLES))


def really_pruned(model, config, data):
    """Return a copy that is cut with one candidate, without compensation."""
    model, scorer = copy.deepcopy(model), load_scorer(config)
    if config.kind == "structured":
        config = replace(config, compensation="none")
    FIND_TARGETS[config.kind](model, config, scorer).prune_(model, scorer, data, config)
    return model


@torch.no_grad()
def kl(dense, pruned, data):
    """Mean over predicted tokens of `sum_v P (log P - log Q)`, in loops."""
    total, tokens = 0.0, 0
    for i in range(len(data.samples)):
        (p, wanted), (q, _) = forward(dense, data, i), forward(pruned, data, i)
        for position, _ in wanted:
            log_p, log_q = (x[position].double().log_softmax(dim=-1).tolist() for x in (p, q))
            total += sum(math.exp(a) * (a - b) for a, b in zip(log_p, log_q, strict=True))
            tokens += 1
    return total / tokens


@pytest.mark.parametrize(("build", "way"), CASES, ids=NAMES)
class TestEveryWay:
    def test_the_lowest_kl_is_chosen(self, build, way):
        model = build()
        config = config_for(model, way)
        candidates, held_out = parts(drawn(model, config))
        expected = [kl(model, really_pruned(model, config, batch), held_out) for batch in candidates]
        again = copy.deepcopy(model)

        report = prune(model, config)
        found = report.calibration["selection"]
        assert found["kl"] == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert found["chosen"] == min(range(CANDIDATES), key=expected.__getitem__)
        assert len(set(expected)) > 1 and min(expected) > 0
        chosen = candidates[found["chosen"]]
        told = {"selection": found, "passages": passages(chosen.rows())}
        assert report.calibration == chosen.to_dict() | told
        assert found["tokens"] == held_out.tokens and found["seconds"] > 0
        assert json.loads(json.dumps(found)) == found

        alone = replace(config, calibration=replace(config.calibration, selection="none"))
        scorer = load_scorer(alone)
        FIND_TARGETS[config.kind](again, alone, scorer).prune_(again, scorer, chosen, alone)
        assert bits(model) == bits(again)

    def test_the_model_stays_as_it_was_until_the_choice(self, build, way):
        model = build()
        model.requires_grad_(False)
        model.get_output_embeddings().weight.requires_grad_()
        model.train()
        config, before = config_for(model, way), everything(model)
        targets = FIND_TARGETS[config.kind](model, config, load_scorer(config))
        _, found = select(model, targets, load_scorer(config), config, drawn(model, config))
        assert len(found.kl) == CANDIDATES
        assert everything(model) == before and not targets.__dict__.get("notes")

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    def test_an_error_on_the_way_leaves_it_too(self, build, way, error, monkeypatch):
        model = build()
        before = everything(model)

        def evaluate(pruned, *_, **__):
            assert everything(pruned) != before  # in the middle of a trial
            raise error("in the middle")

        monkeypatch.setattr(selection, "evaluate_model", evaluate)
        with pytest.raises(error, match="in the middle"):
            prune(model, config_for(model, way))
        assert everything(model) == before


def bits(model):
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


def everything(model):
    """The bits, the modes and the hooks of a model."""
    return {
        "bits": bits(model),
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "parameters": [id(p) for p in model.parameters()],
    }


def test_candidates_and_held_out_samples_have_nothing_in_common(monkeypatch):
    model, looked_at, measured_on = llama(), [], []
    config = config_for(model)
    targets_class = type(FIND_TARGETS["structured"](model, config, load_scorer(config)))
    score, evaluate = targets_class.score, selection.evaluate_model

    def scored(self, model, scorer, data, config):
        looked_at.append({tuple(sample.tolist()) for sample in data.samples})
        return score(self, model, scorer, data, config)

    def measured(model, data, **options):
        measured_on.append({tuple(sample.tolist()) for sample in data.samples})
        return evaluate(model, data, **options)

    monkeypatch.setattr(targets_class, "score", scored)
    monkeypatch.setattr(selection, "evaluate_model", measured)
    report = prune(model, config)
    *trials, last = looked_at
    assert len(trials) == CANDIDATES and last == trials[report.calibration["selection"]["chosen"]]
    assert len(set.union(*trials)) == SIZE * CANDIDATES
    assert len(measured_on) == CANDIDATES and all(samples == measured_on[0] for samples in measured_on)
    assert len(measured_on[0]) == HELD_OUT and set.union(*trials).isdisjoint(measured_on[0])


@pytest.mark.parametrize(("seq_len", "more"), [(64, 128), (128, 64), (100, 82), (8192, 1), (10_000, 1)])
def test_what_is_asked_for(seq_len, more, monkeypatch):
    """128 x 64 tokens are held out, beside all candidates."""
    monkeypatch.undo()
    config = CalibrationConfig(num_samples=32, candidates=8, selection="kl")
    assert widened(config, seq_len) == replace(config, num_samples=32 * 8 + more)


def test_the_length_that_the_scorer_recommends_decides():
    """ntk recommends 128 tokens, of which this model reads 64 at most: one sample holds what is held out."""
    model = llama()
    config = replace(config_for(model, "structured, compensated", seq_len=None), compensation="none")
    report = prune(model, config)
    assert report.calibration["seq_len"] == 64 and report.calibration["selection"]["tokens"] == LENGTH


def test_samples_of_one_token_are_refused():
    calibration = CalibrationConfig([[5]] * 200, num_samples=2, candidates=2, selection="kl", seq_len=64)
    config = PruningConfig(scorer="wanda", sparsity=0.4, calibration=calibration)
    with pytest.raises(CalibrationError, match="no sample has a second token"):
        prune(llama(), config)
    with pytest.raises(CalibrationError, match=r"no sample has a second token.* Raise seq_len"):
        make_plan(llama(), replace(config, calibration=replace(calibration, seq_len=1)))


@pytest.mark.parametrize("way", WAYS)
def test_too_few_samples(way):
    model = llama()
    config = config_for(model, way, samples=SAMPLES - 1)
    before = everything(model)
    with pytest.raises(
        CalibrationError,
        match=rf"selection='kl' needs {SAMPLES} samples \(4 candidates of 2, the rest held out\); in-memory: .* gives "
        rf"only {SAMPLES - 1}\. Lower candidates, num_samples or seq_len, or leave selection out",
    ):
        prune(model, config)
    assert everything(model) == before
    prune(model, config_for(model, way, samples=SAMPLES))


def test_the_same_seed_twice():
    models = [llama() for _ in range(3)]
    first, again, other = (
        prune(model, config_for(model, seed=seed)) for model, seed in zip(models, (0, 0, 1), strict=True)
    )
    measured, twice = (dict(report.calibration["selection"], seconds=None) for report in (first, again))
    assert measured == twice and first.fingerprint == again.fingerprint
    assert bits(models[0]) == bits(models[1])
    assert other.calibration["selection"]["kl"] != measured["kl"]


def test_logits_that_are_scaled_are_refused_by_name():
    model = with_scaled_logits(llama())
    before = everything(model)
    with (
        pytest.warns(UserWarning, match="not available for LlamaForCausalLM"),
        pytest.raises(UnsupportedModel, match=r"selection='kl' cannot .* LlamaForCausalLM.* Use selection='none'"),
    ):
        prune(model, config_for(model))
    assert everything(model) == before


def test_a_candidate_that_breaks_the_model_is_not_chosen(monkeypatch):
    evaluate, left = selection.evaluate_model, [0.5, math.nan, 0.25, math.nan]

    def measured(*args, **options):
        return replace(evaluate(*args, **options), kl=left.pop())

    monkeypatch.setattr(selection, "evaluate_model", measured)
    model = llama()
    assert prune(model, config_for(model)).calibration["selection"]["chosen"] == 1


def test_a_choice_of_data_that_nothing_looks_at_is_refused():
    calibration = CalibrationConfig([[1, 2, 3]], selection="kl")
    for compensation in ("none", "least_squares"):
        with pytest.raises(InvalidConfig, match=r"selection='kl' chooses the data.*magnitude looks at none"):
            prune(
                llama(),
                PruningConfig("structured", "magnitude", 0.3, compensation=compensation, calibration=calibration),
            )


def test_an_interrupted_trial_of_zeros_does_not_call_the_model_pruned(monkeypatch):
    """All is put back, so the error is what it was."""
    model = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def interrupted(*_):
        raise KeyboardInterrupt

    config = PruningConfig("unstructured", "magnitude", 0.5)
    scorer = load_scorer(config)
    targets = masking.find_mask_targets(model, config, scorer)
    monkeypatch.setattr(masking, "matrix_mask", interrupted)
    with pytest.raises(KeyboardInterrupt), targets.trial(model, scorer, None, config):
        pass
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_without_selection_nothing_is_told():
    model = llama()
    assert "selection" not in prune(model, config_for(model, selection="none")).calibration


def logits(model):
    with torch.no_grad():
        return model(**inputs(model)).logits


def drawn_scores(targets, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = {}
    for pool in targets.pools:
        for entry in getattr(pool, "entries", None) or [[layer] for layer in pool.layers]:
            for member in entry:
                sizes[member.name] = getattr(member, "num_units", 0)
    return {name: torch.rand([size] if size else [], generator=generator) for name, size in sizes.items()}


def assert_hidden_is_cut(model, config):
    """Whatever is chosen, the model computes the same with it hidden and with it gone."""
    scorer = load_scorer(config)
    targets = FIND_TARGETS[config.kind](model, config, scorer)
    dense, before = logits(model), everything(model)
    kept = targets.choose(drawn_scores(targets))
    with targets.hidden(model, kept):
        hidden = logits(model)
    assert everything(model) == before and torch.equal(logits(model), dense)
    targets.cut_(model, kept)
    assert (hidden - dense).abs().max() > 1e-3
    torch.testing.assert_close(logits(model), hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("options", [{"allocation": "uniform"}, {"allocation": "gamma", "round_to": 1}], ids=str)
def test_hidden_units_are_as_good_as_gone(name, options):
    config = PruningConfig(scorer="magnitude", sparsity=0.5, **{"round_to": 4} | options)
    if name == "llama-mqa":
        config = replace(config, units=["mlp_channel"])
    assert_hidden_is_cut(VARIANTS[name](), config)


def test_hidden_units_of_a_tower():
    config = PruningConfig(scorer="magnitude", sparsity=0.5, allocation="global", stacks=["vision", "language"])
    model = llava()
    assert_hidden_is_cut(model, config)


@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_blocks_are_as_good_as_gone(name):
    config = PruningConfig(pattern="layers", scorer="random", sparsity=0.4, keep_first=0, keep_last=0)
    assert_hidden_is_cut(VARIANTS[name](), config)


@pytest.mark.parametrize("kept", [[0, 1, 2], [1, 2], [2]])
def test_hidden_first_blocks_of_t5(kept):
    """The first block owns the position bias of all others."""
    model = t5()
    config = PruningConfig(pattern="layers", scorer="random", sparsity=0.4, keep_first=0, keep_last=0)
    targets = FIND_TARGETS["layers"](model, config, load_scorer(config))
    choice = {layer.name: torch.arange(int(layer.layer in kept)) for pool in targets.pools for layer in pool.layers}
    with targets.hidden(model, choice):
        hidden = logits(model)
    targets.cut_(model, choice)
    torch.testing.assert_close(logits(model), hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "kind"), sorted({(name, kind) for name, _, kind in SUBLAYERS}))
def test_hidden_sublayers_are_as_good_as_gone(name, kind):
    options = {"pattern": "layers", "scorer": "random", "units": [kind], "keep_first": 0, "keep_last": 0}
    assert_hidden_is_cut(VARIANTS[name](), PruningConfig(sparsity=0.4, **options))
