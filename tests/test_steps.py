"""Units that go in several steps: as many as in one, for good, and chosen by what the model is by then."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false

import copy
import itertools

import pytest
import torch

from optimum_prune import CalibrationConfig, InvalidConfig, PruningConfig, registry, structured
from optimum_prune.binding import bind
from optimum_prune.calibration.data import load_samples
from optimum_prune.pipeline import prune
from optimum_prune.refit import compensate_
from optimum_prune.scoring import score_groups
from optimum_prune.sizes import describe_
from optimum_prune.surgery import slice_
from tests.models import VARIANTS, inputs, llama, llava, opt, source, t5

SCORERS = [name for name in registry.available("scorers") if "structured" in registry.load("scorers", name).patterns]
COMPENSATIONS = ["none", "least_squares"]


def config_for(model, scorer="taylor", steps=3, **options) -> PruningConfig:
    calibration = CalibrationConfig(source(model), num_samples=4, seq_len=12)
    return PruningConfig(
        scorer=scorer, steps=steps, calibration=calibration, **{"sparsity": 0.4, "round_to": 1} | options
    )


def counts(report):
    """Units before and after of each stack and kind."""
    return {
        (stack, unit): (total["before"], total["after"])
        for stack, units in report.per_stack.items()
        for unit, total in units.items()
    }


@pytest.fixture
def stages(monkeypatch):
    """What was kept after each step, by the name of the group."""
    seen: list[dict[str, list[int]]] = []

    def compensated(model, groups, kept, *rest):
        seen.append({name: units.tolist() for name, units in kept.items()})
        return compensate_(model, groups, kept, *rest)

    def hidden(group, kept):
        if not seen or group.name in seen[-1]:
            seen.append({})
        seen[-1][group.name] = kept.tolist()
        hide(group, kept)

    hide = structured.hide_
    monkeypatch.setattr(structured, "compensate_", compensated)
    monkeypatch.setattr(structured, "hide_", hidden)
    return seen


@pytest.mark.parametrize("compensation", COMPENSATIONS)
@pytest.mark.parametrize("allocation", ["uniform", "global", "gamma"])
@pytest.mark.parametrize("scorer", SCORERS)
def test_as_many_go_as_in_one_step_and_they_stay_away(scorer, allocation, compensation, stages):
    if registry.load("scorers", scorer).comparable != "model" and allocation != "uniform":
        pytest.skip("its scores are ranked inside of a layer")
    one, several = llama(), llama()
    options = {"allocation": allocation, "compensation": compensation}
    at_once = prune(one, config_for(one, scorer, steps=1, **options))
    stages.clear()
    report = prune(several, config_for(several, scorer, steps=3, **options))
    assert counts(report) == counts(at_once) and report.achieved == at_once.achieved
    if allocation == "uniform":
        assert [group.after for group in report.groups] == [group.after for group in at_once.groups]
    assert len(stages) == 3
    for earlier, later in itertools.pairwise(stages):
        assert earlier.keys() == later.keys() == {group.name for group in report.groups}
        assert all({*later[name]} <= {*earlier[name]} for name in earlier)
        assert sum(map(len, later.values())) < sum(map(len, earlier.values()))
    assert stages[-1] == {group.name: group.kept for group in report.groups}


@pytest.mark.parametrize("allocation", ["uniform", "global"])
def test_what_has_gone_stays_away_whatever_its_later_scores(allocation, stages, monkeypatch):
    calls = []

    def scored(*args, **options):
        calls.append(score_groups(*args, **options))
        sign = -1 if len(calls) > 1 else 1  # from then on, the lowest are the highest
        return [{name: sign * scores for name, scores in found.items()} for found in calls[-1]]

    monkeypatch.setattr(structured, "score_groups", scored)
    model = llama()
    report = prune(model, config_for(model, "magnitude", allocation=allocation, compensation="none"))
    assert len(calls) == 3 and report.achieved > 0.3
    for earlier, later in itertools.pairwise(stages):
        assert all({*later[name]} <= {*earlier[name]} for name in earlier)


@pytest.mark.parametrize("round_to", [4, 8])
def test_rounding_spares_nothing_that_has_gone(round_to, stages):
    model = llama()
    report = prune(model, config_for(model, allocation="global", round_to=round_to, compensation="none"))
    for earlier, later in itertools.pairwise(stages):
        assert all({*later[name]} <= {*earlier[name]} for name in earlier)
    assert all(group.after % round_to == 0 for group in report.groups if group.unit == "mlp_channel")


@pytest.mark.parametrize("name", ["opt", "t5", "t5-gated", "llava", "gemma2"])
@pytest.mark.parametrize("compensation", COMPENSATIONS)
def test_every_architecture(name, compensation, stages):
    model = VARIANTS[name]()
    report = prune(model, config_for(model, steps=2, compensation=compensation, sparsity=0.5))
    assert len(stages) == 2 and stages[-1] == {group.name: group.kept for group in report.groups}
    with torch.no_grad():
        assert torch.isfinite(model(**inputs(model)).logits).all()
    assert report.config["steps"] == 2


@pytest.mark.parametrize("compensation", COMPENSATIONS)
@pytest.mark.parametrize(
    ("build", "scorer"),
    [
        *((llama, name) for name in SCORERS if name not in ("random", "magnitude")),
        *((t5, name) for name in ("taylor", "obs")),
        *((opt, name) for name in ("ntk", "afr")),
    ],
)
def test_a_later_step_scores_the_model_that_is_left(build, scorer, compensation, stages, monkeypatch):
    """What is hidden by then has no part in it: the scores are those of a model in which it has been cut."""
    model, found = build(), []
    config = config_for(model, scorer, steps=2, compensation=compensation, units=["kv_group", "mlp_channel"])
    left = copy.deepcopy(model)

    def scored(*args, **options):
        found.append(score_groups(*args, **options))
        return found[-1]

    monkeypatch.setattr(structured, "score_groups", scored)
    prune(model, config)
    kept = {name: torch.tensor(units) for name, units in stages[0].items()}
    default = registry.load("scorers", scorer)
    data = load_samples(config.calibration, left, default_seq_len=default.seq_len)
    if compensation != "none":
        compensate_(left, bind(left), kept, list(data.even_batches(4)), compensation)
    for group in bind(left):
        slice_(group, kept[group.name])
    describe_(left)
    (expected,) = score_groups(left, bind(left), [default], data=data, batch_size=4)
    assert len(found) == 2
    for group in bind(left):
        got, wanted = found[1][0][group.name][kept[group.name]], expected[group.name]
        torch.testing.assert_close(_up_to_scale(got), _up_to_scale(wanted), rtol=1e-2, atol=1e-4)


def _up_to_scale(scores):
    """Of AFR, whose S is measured in standard deviations of its layer: columns of mean 1, since z drops any scale."""
    return scores / scores.mean(dim=0) if scores.dim() == 2 else scores


def everything(model):
    return {
        "bits": {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()},
        "parameters": [id(parameter) for parameter in model.parameters()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "config": model.config.to_dict(),
    }


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("compensation", ["none", "least_squares", "sequential", "bias"])
@pytest.mark.parametrize("where", ["score_groups", "compensate_"])
def test_an_error_in_a_later_step_leaves_the_model_as_it_was(where, compensation, error, monkeypatch):
    if where == "compensate_" and compensation == "none":
        pytest.skip("nothing is compensated")
    model, calls = opt(), []
    before, original = everything(model), getattr(structured, where)

    def fails(*args, **options):
        calls.append(everything(model)["bits"])
        if len(calls) == 2:
            raise error("in a later step")
        return original(*args, **options)

    monkeypatch.setattr(structured, where, fails)
    with pytest.raises(error, match="in a later step"):
        prune(model, config_for(model, steps=3, compensation=compensation))
    assert len(calls) == 2 and calls[-1] != before["bits"]  # something had been hidden by then
    assert everything(model) == before


@pytest.mark.parametrize("options", [{"pattern": "2:4"}, {"pattern": "unstructured", "sparsity": 0.5}], ids=str)
def test_refused_with_weights(options):
    with pytest.raises(InvalidConfig, match=r"steps=3 has no meaning with pattern '.*': single weights are chosen"):
        PruningConfig(steps=3, **options)


def test_refused_with_layers():
    with pytest.raises(InvalidConfig, match=r"steps=3 has no meaning with pattern 'layers': .* chosen at once"):
        PruningConfig(pattern="layers", sparsity=0.5, steps=3)


def test_more_steps_than_units():
    """Steps in which nothing goes are no error."""
    model = llava()
    report = prune(model, config_for(model, steps=9, units=["kv_group"], sparsity=0.25, allocation="uniform"))
    assert {group.after for group in report.groups} == {3}
