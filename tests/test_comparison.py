"""Several settings on one model: the numbers of real runs, one draw, few passes, and a model that stays as it is."""

import json
import math
import re
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from optimum_prune import masking
from optimum_prune.calibration.data import load_samples
from optimum_prune.comparing import memory, passes, running
from optimum_prune.comparing.memory import measured_peak
from optimum_prune.comparing.naming import named
from optimum_prune.comparing.plot import picture
from optimum_prune.comparing.ranks import ranks, spearman
from optimum_prune.comparing.recipe import read_settings
from optimum_prune.comparing.results import Comparison, Row
from optimum_prune.comparing.running import compare
from optimum_prune.comparing.trials import prepare
from optimum_prune.config import CalibrationConfig, PruningConfig
from optimum_prune.errors import CalibrationError, InvalidConfig, UnsupportedModel
from optimum_prune.evaluation import dense_reference, evaluate_model
from optimum_prune.measurements import Evaluation
from optimum_prune.pipeline import prune
from optimum_prune.plots import style
from optimum_prune.pruner import Pruner
from tests.models import VARIANTS, llama, source, t5, tokens, with_scaled_logits

EXAMPLES = Path(__file__).parents[1] / "examples"
LENGTHS = (24, 24, 17, 24, 9, 24)
SAMPLES = [tokens(1, length, seed=i)[0].tolist() for i, length in enumerate(LENGTHS)]
HELD_OUT = CalibrationConfig(tokens(6, 24, seed=9).tolist())
DATA = CalibrationConfig(SAMPLES, num_samples=6, seq_len=24)
MANY = CalibrationConfig(tokens(400, 24, seed=3).tolist(), num_samples=4, seq_len=24)
CHOICE = replace(MANY, selection="kl", candidates=2)


def cut(scorer, **changes) -> PruningConfig:
    return PruningConfig(scorer=scorer, **{"sparsity": 0.4, "calibration": DATA} | changes)


def biased():
    return llama(attention_bias=True, mlp_bias=True)


SETTINGS = {
    "taylor": cut("taylor"),
    "ntk": cut("ntk", compensation="none", round_to=1),
    "afr": cut("afr", compensation="none"),
    "wanda, least squares": cut("wanda", compensation="least_squares"),
    "wanda, sequential": cut("wanda", compensation="sequential"),
    "wanda, bias": cut("wanda", compensation="bias"),
    "magnitude, bias": cut("magnitude", compensation="bias", allocation="global"),
    "random": cut("random", seed=3),
    "steps": cut("taylor", steps=3, compensation="none", round_to=1),
    "steps, bias": cut("taylor", steps=3, compensation="bias", round_to=1),
    "steps, least squares": cut("taylor", steps=2, compensation="least_squares", round_to=1),
    "layers": cut("block_influence", pattern="layers"),
    "sub-layers": cut("random", pattern="layers", units=["attention", "mlp"], keep_last=0),
    "unstructured": cut("wanda", pattern="unstructured"),
    "global": cut("magnitude", pattern="unstructured", allocation="global"),
    "2:4": cut("sparsegpt", pattern="2:4", sparsity=None),
}


def everything(model) -> dict[str, Any]:
    """Return whatever a comparison may not change."""
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())
    modes = [module.training for module in model.modules()]
    required = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    gradients = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return {"state": state, "rest": (hooks, modes, required, gradients, model.config.to_dict())}


def assert_untouched(model, before):
    now = everything(model)
    assert now["rest"] == before["rest"]
    for name, tensor in before["state"].items():
        assert torch.equal(now["state"][name], tensor), name


def real(model, config, held_out, reference) -> tuple[Evaluation, float]:
    """Prune a copy, and measure that."""
    copy = deepcopy(model)
    report = prune(copy, config)
    return evaluate_model(copy, held_out, batch_size=4, reference=reference), report.achieved


def assert_equals_real_run(row, model, config, evaluation=HELD_OUT):
    held_out = load_samples(evaluation, model, order="first")
    measured, achieved = real(model, config, held_out, dense_reference(model, held_out))
    assert row.perplexity == pytest.approx(measured.perplexity, rel=1e-4)
    assert row.kl == pytest.approx(measured.kl, rel=1e-3)
    assert row.accuracy == pytest.approx(measured.accuracy)
    assert row.achieved == pytest.approx(achieved, abs=1e-12)


@pytest.fixture(scope="module")
def model():
    return biased().train()


@pytest.fixture(scope="module")
def compared(model):
    """Return the comparison of all settings; the model is checked before any other test sees it."""
    before = everything(model)
    found = compare(model, SETTINGS, HELD_OUT)
    assert_untouched(model, before)
    return found


# Numbers


def test_one_row_for_every_setting(compared):
    assert [row.setting for row in compared.rows] == list(SETTINGS)
    assert len({row.perplexity for row in compared.rows}) == len(SETTINGS)  # no setting ran as another


@pytest.mark.parametrize("name", SETTINGS)
def test_row_equals_a_real_run(name, compared, model):
    row = next(row for row in compared.rows if row.setting == name)
    assert_equals_real_run(row, model, SETTINGS[name])
    assert row.asked == (SETTINGS[name].sparsity or 0.5)


def test_dense_row(compared, model):
    measured = evaluate_model(model, load_samples(HELD_OUT, model, order="first"), batch_size=4)
    assert replace(compared.dense, context=[]) == measured and compared.measure == "perplexity"


@pytest.mark.parametrize("build", [t5, VARIANTS["t5-gated"], VARIANTS["opt"], VARIANTS["llava"]])
def test_other_architectures(build):
    model = build()
    data = CalibrationConfig(source(model, samples=6), num_samples=6, seq_len=12)
    settings = {"taylor": cut("taylor", calibration=data), "ntk": cut("ntk", calibration=data, compensation="none")}
    before = everything(model)
    found = compare(model, settings, data)
    assert_untouched(model, before)
    for row in found.rows:
        assert_equals_real_run(row, model, settings[row.setting], data)
    assert found.measure == ("loss" if model.config.is_encoder_decoder else "perplexity")
    assert f"  {found.measure}  " in str(found)


@pytest.mark.parametrize("changes", [{"pattern": "structured"}, {"pattern": "unstructured"}])
def test_choice_of_the_calibration_batch(changes, model):
    settings = {
        "plain": cut("wanda", calibration=MANY, **changes),
        "kl": cut("wanda", calibration=CHOICE, **changes),
    }
    before = everything(model)
    found = compare(model, settings, HELD_OUT)
    assert_untouched(model, before)
    assert found.calibration is not None and found.calibration["samples"] == MANY.num_samples
    for row in found.rows:  # the plain one too: its samples are the first of the draw of both
        assert_equals_real_run(row, model, settings[row.setting])


def test_sparsities(model):
    settings = [cut("magnitude"), cut("random", sparsity=0.1)]
    found = compare(model, settings, HELD_OUT, [0.25, 0.5])
    assert [(row.setting, row.asked) for row in found.rows] == [
        (name, sparsity) for name in ("magnitude", "random") for sparsity in (0.25, 0.5)
    ]
    for row in found.rows:
        assert_equals_real_run(row, model, replace(cut(row.setting), sparsity=row.asked))
    assert found.calibration is None


def test_one_setting_at_its_own_sparsities(model):
    found = compare(model, [cut("random", sparsity=s) for s in (0.25, 0.5)], HELD_OUT)
    assert [(row.setting, row.asked) for row in found.rows] == [("random", 0.25), ("random", 0.5)]


def test_longest_recommended_sequences():
    model = llama(max_position_embeddings=600)
    data = CalibrationConfig([tokens(1, 520)[0].tolist()], num_samples=1)
    settings = {name: cut(name, calibration=data, compensation="none") for name in ("magnitude", "ntk", "taylor")}
    calibration = compare(model, settings, HELD_OUT).calibration
    assert calibration is not None and calibration["seq_len"] == 512  # taylor's; ntk's is 128


def test_logits_that_no_head_makes():
    model = with_scaled_logits(llama())
    with pytest.warns(UserWarning, match="KL"):
        (row,) = compare(model, [cut("random")], HELD_OUT).rows
    assert row.kl is None and row.perplexity > 1


# Passes


@pytest.fixture
def passed(monkeypatch):
    """Return a list that fills with the names of the scorers of each pass."""
    names = []

    def score_groups(model, groups, scorers, **options):
        names.append([scorer.name for scorer in scorers])
        return original(model, groups, scorers, **options)

    original = passes.score_groups
    monkeypatch.setattr(passes, "score_groups", score_groups)
    return names


def forwards(model, work) -> int:
    calls = []
    handle = model.get_input_embeddings().register_forward_hook(lambda *_: calls.append(1))
    try:
        work()
    finally:
        handle.remove()
    return len(calls)


def test_one_pass_serves_all_that_look_at_the_same(model, passed):
    alone = {"a": cut("afr", compensation="none")}
    more = alone | {
        "b": cut("afr", compensation="none", allocation="global"),
        "c": cut("afr", compensation="none", scorer_options={"power": 1, "signed": False}),
    }
    one = forwards(model, lambda: compare(model, alone, HELD_OUT))
    held_out = load_samples(HELD_OUT, model, order="first")
    evaluation = forwards(model, lambda: evaluate_model(model, held_out, batch_size=HELD_OUT.batch_size))
    passed.clear()
    many = forwards(model, lambda: compare(model, more, HELD_OUT, [0.25, 0.4, 0.5]))
    assert passed == [["afr", "afr"]]  # two scorers: the allocation does not change the scores
    assert many == one + 8 * evaluation


def test_others_have_passes_of_their_own(model, passed):
    others = [
        cut("afr", scorer_options={"refer": "feature"}),
        cut("afr", scorer_options={"refer": "magnitude"}),
        cut("taylor"),
        cut("taylor", units=["mlp_channel"]),
        cut("wanda"),
        cut("random"),
        cut("random", seed=1),
    ]
    compare(model, others, HELD_OUT, [0.3, 0.4])
    assert passed == [["afr"], ["afr"], ["taylor"], ["taylor"], ["wanda"], ["random"], ["random"]]


def test_what_is_measured_was_calibrated_on(model, tmp_path, caplog):
    found = compare(model, [cut("wanda")], replace(DATA, num_samples=2))
    (sentence,) = found.dense.context
    assert sentence.startswith("Measured on the data that the model was calibrated on (in-memory: 6 token lists, ")
    assert "100% of the measured passages" in sentence and sentence in caplog.messages
    assert sentence in str(found) and sentence in found.to_markdown()
    assert compare(model, [cut("random")], HELD_OUT).dense.context == []


def test_costs(compared):
    rows = {row.setting: row for row in compared.rows}
    turns = {"steps", "steps, bias", "steps, least squares", "unstructured", "global", "2:4"}
    assert {name for name, row in rows.items() if row.scoring_seconds is None} == turns
    assert all(row.pruning_seconds > 0 for row in compared.rows)
    same = {rows[name].scoring_seconds for name in ("wanda, least squares", "wanda, sequential", "wanda, bias")}
    assert len(same) == 1  # one pass, reported of each
    if sys.platform.startswith("linux"):
        assert all(row.peak_bytes is not None and 0 <= row.peak_bytes < 2**30 for row in compared.rows)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no high-water mark to reset")
def test_peak_memory(model):
    pins = []
    for count in (8000, 4000):  # of small blocks, which an allocator keeps when they are freed behind a living one
        with measured_peak(model) as peak:
            blocks = [torch.ones(4096) for _ in range(count)]
            pins.append(torch.ones(4096))
            del blocks
        assert peak.bytes == pytest.approx(count * 16384, rel=0.1)


def test_peak_memory_elsewhere(model, monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    with measured_peak(model) as peak:
        pass
    assert peak.bytes is None


# Correlation


def test_ranks_and_spearman():
    assert ranks(torch.tensor([5.0, 1.0, 5.0, 0.0, 5.0])).tolist() == [3.0, 1.0, 3.0, 0.0, 3.0]
    generator = torch.Generator().manual_seed(0)
    one, other = torch.rand(9, generator=generator), torch.rand(9, generator=generator)
    places = [[sorted(x.tolist()).index(value) for value in x.tolist()] for x in (one, other)]
    distance = sum((a - b) ** 2 for a, b in zip(*places, strict=True))
    expected = 1 - 6 * distance / (9 * (81 - 1))
    first, second = {"u": {"g": ranks(one)}}, {"u": {"g": ranks(other)}}
    assert spearman(first, second) == pytest.approx(expected)
    assert spearman(first, {"u": {"g": ranks(-one)}}) == pytest.approx(-1)


def test_spearman_is_a_mean_over_groups_then_over_kinds():
    up, down, flat = ranks(torch.arange(4.0)), ranks(-torch.arange(4.0)), ranks(torch.ones(4))
    first = {"a": {"1": up, "2": up, "3": up}, "b": {"4": up}}
    second = {"a": {"1": up, "2": down, "3": flat, "x": up}, "b": {"4": up}, "c": {"5": up}}
    assert spearman(first, second) == pytest.approx((0 + 1) / 2)
    assert spearman(first, {"d": {"1": up}}) is None


def test_correlations(compared):
    structured = [name for name, config in SETTINGS.items() if config.kind == "structured" and config.steps == 1]
    found = compared.correlations
    assert list(found) == structured and all(list(row) == structured for row in found.values())
    for name in structured:
        assert found[name][name] == pytest.approx(1)
        assert all(found[name][other] == found[other][name] for other in structured)
    assert found["wanda, bias"]["wanda, least squares"] == pytest.approx(1)
    assert all(abs(value) < 0.3 for name, value in found["random"].items() if name != "random")
    assert found["taylor"]["ntk"] > 0.3


def test_no_common_groups_and_no_second_setting(model):
    settings = {"heads": cut("magnitude", units=["kv_group"]), "mlp": cut("magnitude", units=["mlp_channel"])}
    found = compare(model, settings, HELD_OUT)
    assert found.correlations["heads"]["mlp"] is None and " -" in str(found)
    assert compare(model, [cut("random")], HELD_OUT).correlations == {}


# Names


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ([cut("ntk")], ["ntk"]),
        ([cut("ntk", units=["kv_group"]), cut("wanda", units=["kv_group"])], ["ntk", "wanda"]),
        ([cut("ntk"), cut("ntk", compensation="none")], ["ntk", "ntk compensation=none"]),
        (
            [cut("ntk"), cut("ntk", scorer_options={"objective": "loss"}), cut("ntk", allocation="global")],
            ["ntk", "ntk objective=loss", "ntk allocation=global"],
        ),
        (
            [cut("afr", scorer_options={"trim": [2, 98]}), cut("afr", scorer_options={"signed": False})],
            ["afr trim=2+98", "afr signed=no"],
        ),
        ([cut("wanda"), cut("wanda", pattern="2:4", sparsity=None)], ["wanda", "wanda 2:4"]),
        ([cut("ntk", calibration=MANY), cut("ntk", calibration=CHOICE)], ["ntk", "ntk selection=kl candidates=2"]),
        ([cut("ntk", sparsity=0.1), cut("ntk", sparsity=0.2)], ["ntk", "ntk"]),
        (
            [cut("wanda", pattern="unstructured", sparsity={pattern: 0.5}) for pattern in ("*.mlp", "*.self_attn")],
            ["wanda sparsity=*.mlp:0.5", "wanda sparsity=*.self_attn:0.5"],
        ),
    ],
)
def test_names_are_made_from_what_differs(settings, names):
    assert [name for name, _ in named(settings)] == names


# Refusals


@pytest.fixture
def nothing_runs(monkeypatch):
    def run(*arguments, **options):
        raise AssertionError("something was measured")

    for name in ("dense_reference", "evaluate_model"):
        monkeypatch.setattr(running, name, run)


REFUSED = [
    ([], "settings must be PruningConfigs, at least one"),
    ("ntk", "Setting 0 must be a PruningConfig, got a str."),
    ({"a": {"scorer": "ntk"}}, "Setting 'a' must be a PruningConfig, got a dict."),
    *(
        (
            {name: cut("ntk")},
            f"The name of a setting must be one line of text that is not empty, and not 'dense', got {name!r}.",
        )
        for name in (" ", "a\nb", "a\0", "\ud800", "dense", 3)
    ),
    ({"a": cut("ntk"), "b": cut("ntk")}, "Settings 'a' and 'b' are the same at a sparsity of 0.4. Leave one"),
    ([cut("ntk"), cut("ntk")], "Settings 'ntk' and 'ntk' are the same"),
    ([cut("ntk"), cut("admm")], "Setting 'admm': scorer 'admm' ranks for pattern 'unstructured', 'n:m'"),
    ([cut("ntk"), cut("ntk", scorer_options={"f": 1})], "Setting 'ntk f=1': Unknown option of scorer 'ntk'"),
    ([cut("ntk"), cut("wanda", allocation="global")], "Setting 'wanda allocation=global': allocation='global' ranks"),
    ({"a": cut("ntk", exclude=["no.such"])}, "Setting 'a': "),
    ({"a": cut("random", pattern="layers", sparsity=0.99)}, "Setting 'a': layer: 3 targeted"),
    (
        [cut("ntk"), cut("wanda", calibration=replace(DATA, seed=1, batch_size=2))],
        "Settings 'ntk' and 'wanda' differ in calibration (batch_size, seed), but all are compared on one draw of "
        "data. Only selection and candidates may differ.",
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused_before_anything_runs(settings, message, model, nothing_runs):
    with pytest.raises(InvalidConfig, match=re.escape(message)):
        compare(model, settings, HELD_OUT)


@pytest.mark.parametrize(
    ("settings", "sparsities", "message"),
    [
        ([cut("ntk")], [], "sparsities must be None or a list of fractions, at least one, got []."),
        ([cut("ntk")], 0.2, "sparsities must be None or a list of fractions, at least one, got 0.2."),
        ([cut("ntk")], "0.2", "sparsities must be None or a list of fractions, at least one, got '0.2'."),
        ([cut("ntk")], tokens(), "sparsities must be None or a list of fractions, at least one, got tensor"),
        ([cut("ntk"), cut("wanda")], [0.2, 1.0], "Setting 'ntk': sparsity must be in [0, 1), got 1.0."),
        ([cut("ntk")], [0.2, 0.2], "Settings 'ntk' and 'ntk' are the same at a sparsity of 0.2."),
        ([cut("ntk", sparsity=s) for s in (0.1, 0.3)], [0.2], "are the same at a sparsity of 0.2."),
        ([cut("ntk"), SETTINGS["2:4"]], [0.2], "Setting 'sparsegpt 2:4': sparsity=0.2 conflicts with pattern '2:4'"),
        ([cut("ntk")], [0.2, 0.001], "Setting 'ntk': "),
    ],
)
def test_refused_sparsities(settings, sparsities, message, model, nothing_runs):
    with pytest.raises(InvalidConfig, match=re.escape(message)):
        compare(model, settings, HELD_OUT, sparsities)


def test_calibration_may_differ_where_nothing_looks_at_it(model):
    trials = prepare(model, [cut("ntk"), cut("magnitude", calibration=MANY)], None)
    assert [trial.needs_data for trial in trials] == [True, False]


def test_refused_data(model, nothing_runs):
    with pytest.raises(CalibrationError, match=r"Setting 'b': selection='kl' needs .* samples; .* gives only 6"):
        compare(model, {"a": cut("ntk"), "b": cut("ntk", calibration=replace(DATA, selection="kl"))}, HELD_OUT)
    with pytest.raises(CalibrationError, match="does not exist"):
        compare(model, {"a": cut("ntk", calibration=CalibrationConfig("no.txt"))}, HELD_OUT)
    with pytest.raises(CalibrationError, match="does not exist"):
        compare(model, {"a": cut("ntk")}, CalibrationConfig("no.txt"))
    one_token = CalibrationConfig([[5], [6], [7]])
    with pytest.raises(CalibrationError, match=r"^in-memory: .*: no sample has a second token"):
        compare(model, {"a": cut("ntk")}, one_token)
    settings = {"a": cut("ntk", calibration=one_token), "b": cut("taylor", calibration=one_token)}
    with pytest.raises(CalibrationError, match=r"Setting 'b': in-memory: .*: no sample has a second token"):
        compare(model, settings, HELD_OUT)
    with pytest.raises(InvalidConfig, match="text that the model did not write itself"):
        compare(model, {"a": cut("ntk")}, CalibrationConfig("self"))
    with pytest.raises(InvalidConfig, match="selection='kl' has no meaning for evaluation"):
        compare(model, {"a": cut("ntk")}, replace(HELD_OUT, selection="kl"))
    with pytest.raises(InvalidConfig, match="Only language models can be compared, and LlamaModel is none"):
        compare(model.model, {"a": cut("ntk")}, HELD_OUT)


def test_choice_without_kl_is_refused(monkeypatch):
    monkeypatch.setattr(running, "evaluate_model", None)
    with (
        pytest.warns(UserWarning, match="KL"),
        pytest.raises(UnsupportedModel, match="Setting 'b': selection='kl' cannot measure the KL of Llama"),
    ):
        compare(with_scaled_logits(llama()), {"a": cut("random"), "b": cut("ntk", calibration=CHOICE)}, HELD_OUT)


def test_refused_directories(model, nothing_runs, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidConfig, match=re.escape(f"directory {str(folder)!r} cannot be made: ")):
            compare(model, [cut("ntk")], HELD_OUT, directory=folder)
    wrongs: list[Any] = [3, True, [], b"folder"]
    for wrong in wrongs:
        with pytest.raises(InvalidConfig, match=re.escape(f"directory must be None or a path, got {wrong!r}.")):
            compare(model, [cut("ntk")], HELD_OUT, directory=wrong)
    monkeypatch.setattr(style, "find_spec", lambda name: None)
    with pytest.raises(InvalidConfig, match=re.escape("pip install 'optimum-prune[plots]'")):
        compare(model, [cut("ntk")], HELD_OUT, directory=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_file_that_cannot_be_written(model, tmp_path):
    (tmp_path / "comparison.json" / "in the way").mkdir(parents=True)
    before = everything(model)
    with pytest.raises(InvalidConfig, match=r"'.*comparison.json' cannot be written: Is a directory."):
        compare(model, [cut("random")], HELD_OUT, directory=tmp_path)
    assert_untouched(model, before)
    assert [path.name for path in tmp_path.iterdir()] == ["comparison.json"]


# What is written


def row(setting="a", asked=0.2, perplexity=30.0, **changes) -> Row:
    return Row(setting, asked, asked, **{"perplexity": perplexity, **OTHER} | changes)


OTHER = {"kl": 0.1, "accuracy": 0.3, "scoring_seconds": 1.0, "pruning_seconds": 0.2, "peak_bytes": 3_000_000}
MEASURED = Evaluation(20.0, None, 96, 4, 10, 40, "cpu", 1, "float32", {"source": "x", "samples": 4, "tokens": 100})


def comparison(rows, **changes) -> Comparison:
    return replace(Comparison({}, MEASURED, rows, {}, None, {}), **changes)


def test_table_is_sorted():
    rows = [row("a", 0.4, 90.0), row("b", 0.4, 80.0), row("c", 0.2, 99.0), row("d", 0.2, math.nan)]
    shown = str(comparison(rows)).splitlines()
    assert [line.split()[0] for line in shown[:6]] == ["setting", "dense", "c", "d", "b", "a"]
    assert shown[2].split() == ["c", "20.0%", "20.0%", "99.00", "0.1000", "30.0%", "1.0", "s", "0.2", "s", "3.0", "MB"]


def test_what_is_not_known_is_a_dash():
    shown = str(comparison([row(kl=None, scoring_seconds=None, peak_bytes=None)]))
    assert shown.splitlines()[2].split() == ["a", "20.0%", "20.0%", "30.00", "-", "30.0%", "-", "0.2", "s", "-"]
    assert "scoring -: scoring and pruning take turns" in shown


def test_notes_are_said_once():
    shown = str(comparison([row("a", notes=["few tokens"]), row("b", notes=["few tokens"]), row("a", 0.3)]))
    assert shown.endswith("\nnote (a, b): few tokens")


def test_files(compared, tmp_path):
    compared.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"comparison.{kind}" for kind in ("json", "md", "png")]
    data = json.loads((tmp_path / "comparison.json").read_text())
    assert data == json.loads(json.dumps(compared.to_dict()))
    assert [entry["setting"] for entry in data["rows"]] == [entry.setting for entry in compared.ranking]
    assert data["settings"]["taylor"] == json.loads(json.dumps(SETTINGS["taylor"].to_dict()))
    assert data["calibration"]["samples"] == 6 and data["dense"]["data"]["samples"] == 6
    assert set(data["versions"]) == {"optimum_prune", "torch", "transformers"}
    text = (tmp_path / "comparison.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 3 + len(SETTINGS) + 2 + len(compared.correlations)
    assert "![perplexity by sparsity](comparison.png)" in text and "| dense |" in lines[2]
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def drawn(monkeypatch):
    """Return a function that draws a comparison -> the axes."""
    figure = pytest.importorskip("matplotlib.figure")
    seen = []
    original = figure.Figure.add_subplot
    monkeypatch.setattr(figure.Figure, "add_subplot", lambda f, *a, **k: seen.append(original(f, *a, **k)) or seen[-1])

    def draw(found):
        assert picture(found).startswith(b"\x89PNG")
        return seen[-1]

    return draw


def test_lines_over_sparsity(drawn):
    axes = drawn(comparison([row("a", 0.2, 30.0), row("b", 0.2, 25.0), row("b", 0.4, 50.0), row("a", 0.4, 40.0)]))
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert set(lines) == {"dense", "a", "b"} and lines["dense"].get_linestyle() == ":"
    assert list(lines["a"].get_xdata()) == [0.2, 0.4] and list(lines["a"].get_ydata()) == [30.0, 40.0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["b", "a", "dense"]  # as the ends lie
    assert axes.get_yscale() == "linear"


def test_wide_ranges_are_logarithmic(drawn):
    assert drawn(comparison([row("a", 0.2, 30.0), row("a", 0.4, 201.0)])).get_yscale() == "log"
    assert drawn(comparison([row("a", 0.2, 30.0), row("a", 0.4, 199.0)])).get_yscale() == "linear"
    assert drawn(comparison([row("a", 0.2, 30.0), row("b", 0.2, 201.0)])).get_xscale() == "log"


def test_bars_at_one_sparsity(drawn):
    axes = drawn(comparison([row("a", perplexity=40.0), row("b"), row("c", perplexity=math.inf)]))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "a"] and axes.yaxis_inverted()
    assert [bar.get_width() for bar in axes.patches] == [30.0, 40.0]


@pytest.mark.parametrize("name", ["$\\frac$", "_a", "a $b$ c", "100 %", "a_{b"])
def test_names_are_drawn_as_they_are(name, drawn):
    shown = name.replace("$", r"\$")
    legend = drawn(comparison([row(name, 0.2), row(name, 0.4)])).get_legend()
    assert [text.get_text().strip() for text in legend.get_texts()] == [shown, "dense"]
    bars = drawn(comparison([row(name)]))
    assert [label.get_text().strip() for label in bars.get_yticklabels()] == [shown]


def test_a_picture_of_nothing_finite(drawn):
    drawn(comparison([row(perplexity=math.nan)]))


# Interruptions


def test_interrupted_while_evaluating(monkeypatch, tmp_path, model):
    calls = []

    def evaluate(*arguments, **options):
        calls.append(1)
        if len(calls) == 4:  # the dense model, and two settings
            raise KeyboardInterrupt
        return evaluate_model(*arguments, **options)

    monkeypatch.setattr(running, "evaluate_model", evaluate)
    before = everything(model)
    with pytest.raises(KeyboardInterrupt):
        compare(model, [cut("wanda"), cut("random"), cut("taylor")], HELD_OUT, directory=tmp_path)
    assert_untouched(model, before)
    rows = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    assert {entry["setting"] for entry in rows} == {"wanda", "random"}
    assert [path.name for path in tmp_path.iterdir()] == ["comparison.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, UnsupportedModel])
def test_interrupted_while_zeroing(error, monkeypatch, model):
    calls = []

    def zero(target, mask):
        calls.append(1)
        target.linear.weight.fill_(7)
        if len(calls) == 3:
            raise error

    monkeypatch.setattr(masking, "_zero_", zero)
    before = everything(model)
    with pytest.raises(error):  # not "the model is partly pruned"
        compare(model, [cut("wanda", pattern="unstructured")], HELD_OUT)
    assert_untouched(model, before)


def test_what_only_the_run_can_refuse_names_the_setting(model, monkeypatch):
    def score_groups(*arguments, **options):
        raise UnsupportedModel("The scores are not finite.")

    monkeypatch.setattr(passes, "score_groups", score_groups)
    with pytest.raises(UnsupportedModel, match=re.escape("Setting 'b': The scores are not finite.")):
        compare(model, {"a": cut("wanda", pattern="unstructured"), "b": cut("ntk")}, HELD_OUT)


@pytest.mark.parametrize("compensation", ["bias", "sequential", "none"])
def test_interrupted_between_steps(compensation, monkeypatch, model):
    calls = []

    def score_groups(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return passes.score_groups(*arguments, **options)

    monkeypatch.setattr("optimum_prune.structured.score_groups", score_groups)
    before = everything(model)
    with pytest.raises(KeyboardInterrupt):
        compare(model, [cut("taylor", steps=3, compensation=compensation)], HELD_OUT)
    assert_untouched(model, before)


# Pruner


def test_pruner(tmp_path, caplog):
    model = llama()
    model.save_pretrained(tmp_path / "dense")
    pruner = Pruner.from_pretrained(tmp_path / "dense")
    before = everything(pruner.model)
    found = pruner.compare([cut("wanda"), cut("ntk")], HELD_OUT.source, directory=tmp_path / "out", num_samples=4)
    assert_untouched(pruner.model, before)
    assert found.dense.sequences == 4 and (tmp_path / "out" / "comparison.md").exists()
    assert pruner.report is None and not pruner.is_pruned
    pruner.prune(cut("wanda"))
    measured = pruner.evaluate(HELD_OUT.source, num_samples=4, latency=False)
    assert measured.perplexity == pytest.approx(found.rows[0].perplexity, rel=1e-4)
    assert measured.kl == pytest.approx(found.rows[0].kl, rel=1e-3)  # the dense model can still be loaded
    assert "changed by others" not in caplog.text


# Recipes


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("compare_*.yaml")), ids=lambda path: path.stem)
def test_examples_are_ready(path):
    settings = read_settings(path)
    trials = prepare(llama(), settings, [0.3, 0.5])
    assert len(trials) == 2 * len(settings) and len({trial.config.scorer for trial in trials}) == 1
    assert read_settings(path, {"seed": 3, "calibration": {"num_samples": 5}}) == {
        name: replace(config, seed=3, calibration=replace(config.calibration, num_samples=5))
        for name, config in settings.items()
    }


def test_examples_run(model):
    settings = read_settings(
        EXAMPLES / "compare_afr_repairs.yaml", {"calibration": DATA.to_dict() | {"source": SAMPLES}}
    )
    found = compare(model, settings, HELD_OUT, [0.4])
    assert [row.setting for row in found.rows] == list(settings)
    # Two settings may choose the same channels, so equality with a run of its own is what tells the rows apart.
    assert len({json.dumps(setting.scorer_options) for setting in settings.values()}) == len(settings)
    for row, setting in zip(found.rows, settings.values(), strict=True):
        assert_equals_real_run(row, model, replace(setting, sparsity=0.4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("setings: {a: {}}", "Unknown field of "),
        ("settings: {a: {sparsity: 0.2}, a: {sparsity: 0.3}}", "'a' is there twice."),
        ("settings: {1: {sparsity: 0.2}, '1': {sparsity: 0.3}}", "'1' is there twice."),
        ("base: {scorer: ntk}", "must hold settings: a mapping of names to the fields that differ."),
        ("base: [ntk]\nsettings: {a: {}}", "base must be a mapping of fields, got ['ntk']."),
        ("settings: {a: 3}", "a must be a mapping of fields, got 3."),
        ("settings: {a: {sparsty: 0.3}}", "Setting 'a': Unknown PruningConfig field 'sparsty'"),
        ("settings: {a: {sparsity: 3}}", "Setting 'a': sparsity must be in [0, 1), got 3."),
        ("settings: {a: {scorer: ntk}}", "Setting 'a': sparsity is required"),
        ("settings: {a: {sparsity: 0.2, calibration: {x: 1}}}", "Setting 'a': Unknown CalibrationConfig field 'x'"),
        ("settings: {a: {sparsity: 0.2, calibration: 1}}", "calibration must be a mapping of fields, got 1."),
    ],
)
def test_bad_recipes(text, message, tmp_path):
    (tmp_path / "settings.yaml").write_text(text)
    with pytest.raises(InvalidConfig, match=re.escape(message)):
        read_settings(tmp_path / "settings.yaml")


def test_own_fields_win(tmp_path):
    (tmp_path / "s.yaml").write_text(
        "base: {scorer: ntk, sparsity: 0.2, calibration: {num_samples: 3, seed: 1}}\n"
        "settings:\n  a:\n  b: {scorer: wanda, calibration: {seed: 2}}\n"
    )
    assert read_settings(tmp_path / "s.yaml", {"scorer": "taylor"}) == {
        "a": PruningConfig(scorer="taylor", sparsity=0.2, calibration=CalibrationConfig(num_samples=3, seed=1)),
        "b": PruningConfig(scorer="wanda", sparsity=0.2, calibration=CalibrationConfig(num_samples=3, seed=2)),
    }
