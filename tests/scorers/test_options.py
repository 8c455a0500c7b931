"""Options of scorers: from Python, recipes and the shell; which there are; and what ntk's objective changes."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportAttributeAccessIssue=false

import argparse
import json

import pytest
import torch
import yaml

from optimum_prune import CalibrationConfig, InvalidConfig, PruningConfig, registry
from optimum_prune.binding import bind
from optimum_prune.commands.command import OneLineParser
from optimum_prune.commands.flags import add_configs, add_model, add_recipe, read_config
from optimum_prune.pipeline import prune
from optimum_prune.report import PruningReport
from optimum_prune.scorers.ntk import OBJECTIVES, ntk
from optimum_prune.scoring import score_groups
from tests.drawn import data_for
from tests.models import VARIANTS, llama, llava, source, t5
from tests.scorers.plain import forward, gradients, loss, predicted

WITHOUT = [name for name in registry.available("scorers") if registry.load("scorers", name).configure is None]
OPTIONS = {"refer": "feature", "trim": [2, 98], "power": 1.5, "signed": False}


def from_shell(*arguments: object) -> PruningConfig:
    parser = OneLineParser(prog="prune")
    add_model(parser)
    add_recipe(parser)
    add_configs(parser)
    return read_config(parser.parse_args(["--model", "it", "--sparsity", "0.3", *map(str, arguments)]))


def pruned(model, **options):
    calibration = CalibrationConfig(source(model), num_samples=4, seq_len=12)
    return prune(model, PruningConfig(sparsity=0.3, calibration=calibration, **options))


class TestWhereTheyComeFrom:
    @pytest.mark.parametrize("suffix", ["yaml", "json"])
    def test_a_recipe(self, tmp_path, suffix):
        config = PruningConfig(sparsity=0.3, scorer="afr", scorer_options=OPTIONS)
        getattr(config, f"to_{suffix}")(tmp_path / f"it.{suffix}")
        again = PruningConfig.from_file(tmp_path / f"it.{suffix}")
        assert again == config and again.scorer_options == OPTIONS

    def test_a_recipe_by_hand(self, tmp_path):
        (tmp_path / "it.yaml").write_text(
            "sparsity: 0.3\nscorer: afr\nscorer_options:\n  refer: feature\n  trim: [2, 98]\n"
        )
        config = PruningConfig.from_yaml(tmp_path / "it.yaml")
        assert config.scorer_options == {"refer": "feature", "trim": [2, 98]}

    def test_a_mapping(self):
        config = PruningConfig(sparsity=0.3, scorer="afr", scorer_options={"trim": (2, 98)})
        assert config.scorer_options == {"trim": [2, 98]}  # as JSON has it
        assert PruningConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        assert yaml.safe_load(yaml.safe_dump(config.to_dict())) == config.to_dict()

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            (["refer=feature", "trim=[2,98]"], {"refer": "feature", "trim": [2, 98]}),
            (["power=1.5", "signed=false"], {"power": 1.5, "signed": False}),
            (["power=2", "trim=null"], {"power": 2, "trim": None}),
        ],
        ids=str,
    )
    def test_the_shell(self, given, expected):
        assert from_shell("--scorer", "afr", "--scorer-options", *given).scorer_options == expected

    def test_the_shell_overrides_the_recipe(self, tmp_path):
        PruningConfig(sparsity=0.5, scorer="afr", scorer_options=OPTIONS).to_yaml(tmp_path / "it.yaml")
        recipe = ("--recipe", tmp_path / "it.yaml")
        assert from_shell(*recipe).scorer_options == OPTIONS
        assert from_shell(*recipe, "--scorer-options", "power=3").scorer_options == {"power": 3}

    @pytest.mark.parametrize("wrong", ["refer", "=2", "refer=", "trim=[2,"])
    def test_what_the_shell_cannot_read(self, wrong, capsys):
        with pytest.raises(SystemExit):
            from_shell("--scorer", "afr", "--scorer-options", wrong)
        stderr = capsys.readouterr().err
        assert f"argument --scorer-options: expected name=value, got {wrong!r}" in stderr and stderr.count("\n") == 1

    def test_the_shell_takes_each_once(self, capsys):
        with pytest.raises(SystemExit):
            from_shell("--scorer", "afr", "--scorer-options", "power=1", "power=2")
        assert "argument --scorer-options: 'power' is given twice" in capsys.readouterr().err

    @pytest.mark.parametrize("wrong", ["refer", ["refer"], {1: 2}, {"": 2}, {"trim": {2, 98}}, {"trim": torch.ones(2)}])
    def test_what_no_recipe_can_hold(self, wrong):
        with pytest.raises(InvalidConfig, match="scorer_options must be a mapping of names to values"):
            PruningConfig(sparsity=0.3, scorer="afr", scorer_options=wrong)


class TestWhichThereAre:
    @pytest.mark.parametrize("scorer", WITHOUT)
    def test_a_scorer_without_options_takes_none(self, scorer):
        found = registry.load("scorers", scorer)
        assert found.with_options(None) is found and found.with_options({}) is found
        with pytest.raises(InvalidConfig, match=rf"scorer '{scorer}' has no options; .*'power': 2.* was given"):
            found.with_options({"power": 2})

    def test_those_with_options(self):
        assert {*registry.available("scorers")} - {*WITHOUT} >= {"afr", "ntk"}

    @pytest.mark.parametrize(
        ("scorer", "options", "message"),
        [
            ("ntk", {"objectiv": "loss"}, "Unknown option of scorer 'ntk' 'objectiv'.* Did you mean 'objective'"),
            ("ntk", {"objective": "lss"}, "Unknown objective of ntk 'lss'.*'logsumexp'.* Did you mean 'loss'"),
            ("ntk", {"objective": ["loss"]}, r"Unknown objective of ntk \['loss'\]"),
            ("ntk", {"objective": None}, "Unknown objective of ntk None; supported: 'ntk', 'loss', 'mean_logit'"),
            ("afr", {"reffer": "feature"}, "Unknown option of scorer 'afr' 'reffer'.* Did you mean 'refer'"),
            ("taylor", {"objective": "loss"}, "scorer 'taylor' has no options"),
        ],
        ids=str,
    )
    def test_refused_before_anything_is_read(self, scorer, options, message, monkeypatch):
        monkeypatch.setattr("optimum_prune.pipeline.load_samples", lambda *_, **__: pytest.fail("data was read"))
        model = llama()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(InvalidConfig, match=message):
            pruned(model, scorer=scorer, scorer_options=options)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    @pytest.mark.parametrize("scorer", ["afr", "ntk"])
    def test_the_name_and_what_is_recommended_stay(self, scorer):
        """A report names the scorer, and says its options beside the name."""
        plain = registry.load("scorers", scorer)
        other = plain.with_options({"afr": OPTIONS, "ntk": {"objective": "loss"}}[scorer])
        for fact in ("name", "patterns", "units", "allocation", "comparable", "seq_len", "reference"):
            assert getattr(other, fact) == getattr(plain, fact)
        assert other.objectives != plain.objectives


def test_the_report_carries_them():
    model = llama()
    report = pruned(model, scorer="afr", scorer_options=OPTIONS)
    assert report.config["scorer_options"] == OPTIONS
    assert model.config.pruning_config["recipe"]["scorer_options"] == OPTIONS
    assert PruningReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def value_of(objective):
    """Return f of the logits of one sample, `(T, V)`."""
    return {
        "ntk": lambda logits: logits.max(dim=0).values.mean(),
        "mean_logit": lambda logits: logits.mean(),
        "logsumexp": lambda logits: logits.exp().sum(dim=0).log().mean(),
    }[objective]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", ["llama-gqa", "t5", "llava"])
def test_ntk_equals_a_plain_backward(name, objective):
    """S_u = sum over a unit's weights of |df/dW W|, one sample at a time in float64."""
    model = VARIANTS[name]()
    data = data_for(model)
    samples = range(len(data.samples))

    def f(model):
        if objective == "loss":
            return sum(loss(model, data, i) for i in samples) / predicted(model, data)
        return sum(value_of(objective)(forward(model, data, i)[0]) for i in samples) / len(samples)

    found = gradients(model, f)
    (got,) = score_groups(model, bind(model), [ntk(objective)], data=data, batch_size=2)
    for group in bind(model):
        products = [
            (linear.weight.double() * found[path]).abs().detach()
            for path, linear in zip(group.linear_names, group.linears, strict=True)
        ]
        cut = len(group.writers)
        rows = sum(product.view(group.num_units, -1).sum(dim=1) for product in products[:cut])
        columns = sum(product.t().reshape(group.num_units, -1).sum(dim=1) for product in products[cut:])
        expected = (rows + columns).float()
        torch.testing.assert_close(got[group.name], expected, rtol=1e-3, atol=1e-5 * expected.max().item())


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("build", [llama, t5, llava])
def test_every_objective_prunes(build, objective):
    model = build()
    report = pruned(model, scorer="ntk", scorer_options={"objective": objective}, round_to=4)
    assert report.achieved > 0.1 and report.config["scorer_options"] == {"objective": objective}


def test_the_objective_changes_what_goes():
    kept = {}
    for objective in OBJECTIVES:
        report = pruned(llama(), scorer="ntk", scorer_options={"objective": objective})
        kept[objective] = str([group.kept for group in report.groups])
    assert len({*kept.values()}) == 4
    plain = pruned(llama(), scorer="ntk")
    assert str([group.kept for group in plain.groups]) == kept["ntk"]


def test_help_says_how_they_are_written():
    parser = argparse.ArgumentParser()
    add_configs(parser)
    assert "--scorer-options NAME=VALUE" in " ".join(parser.format_help().split())
