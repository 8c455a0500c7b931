"""Reports: the numbers derived from groups, the JSON form, the printed table."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimum_prune.report import WIDTH, PruningReport, is_hub_id
from tests.reports import DATA, group, masked, report


def test_numbers_come_from_the_groups():
    # 3 layers: 12 KV groups of 100 weights, 1 gone; 72 channels of 50 weights, 24 gone
    assert report().achieved == pytest.approx(1 - (1100 + 2400) / (1200 + 3600))
    assert report().per_stack["model.layers"] == {
        "kv_group": {"asked": 0.1, "achieved": pytest.approx(1 / 12), "before": 12, "after": 11},
        "mlp_channel": {"asked": 0.25, "achieved": pytest.approx(1 / 3), "before": 72, "after": 48},
    }
    assert report().per_layer["model.layers", 0] == {"kv_group": (3, 4), "mlp_channel": (16, 24)}


def test_two_groups_of_a_kind_in_one_layer_are_added_up():
    groups = [
        group("decoder.block.0.layer.0", 0, "kv_group", 4, 3, 10, stack="decoder.block"),
        group("decoder.block.0.layer.1", 0, "kv_group", 4, 2, 10, stack="decoder.block"),
    ]
    assert report(groups=groups).per_layer == {("decoder.block", 0): {"kv_group": (5, 8)}}


def test_json_round_trip(tmp_path):
    path = tmp_path / "pruning_report.json"
    report().save(path)
    data = json.loads(path.read_text())
    assert PruningReport.from_dict(data) == report()
    assert PruningReport.from_dict(data).to_dict() == data
    assert data["achieved"] == report().achieved
    assert data["fingerprint"] == report().fingerprint


def test_a_newer_report_is_read_with_a_warning():
    data = report().to_dict()
    data |= {"version": 2, "novelty": 1}
    data["groups"] = [entry | {"novelty": 1} for entry in data["groups"]]
    with pytest.warns(UserWarning, match="version 2, newer than 1"):
        assert PruningReport.from_dict(data) == report()
    assert data["novelty"] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"config": report().config | {"scorer": "magnitude"}},
        {"calibration": DATA | {"fingerprint": "sha256:0"}},
        {"calibration": None},
        {"versions": {"torch": "2.14.0"}},
        {"base_revision": None},
    ],
    ids=str,
)
def test_the_fingerprint_tells_runs_apart(change):
    assert report(**change).fingerprint != report().fingerprint


def test_the_fingerprint_ignores_what_does_not_change_the_result():
    same = report(seconds=9.0, base_model="./elsewhere", config=dict(reversed(report().config.items())))
    assert same.fingerprint == report().fingerprint


def test_the_record_publishes_no_path():
    assert report().record()["base_model"] == "org/dense"
    assert report().record()["recipe"] == report().config
    config = report().config | {"calibration": {"source": "/home/me/text.txt", "num_samples": 32}}
    local = report(config=config, base_model="/home/me/dense", base_revision=None, calibration=None).record()
    assert local["recipe"]["calibration"] == {"source": "text.txt", "num_samples": 32}
    assert not {"base_model", "base_revision", "calibration"} & local.keys()
    assert local["achieved"] == {
        "parameters_before": 10_000,
        "parameters_after": 9_000,
        "sparsity": report().achieved,
    }
    assert json.loads(json.dumps(local)) == local


@pytest.mark.parametrize(
    ("changes", "compensation", "first"),
    [
        ({"steps": 1, "scorer_options": None}, "none", "structured, ntk, gamma 2.5, no compensation: asked"),
        ({"steps": 3}, "sequential", "structured, ntk, gamma 2.5, sequential least squares, 3 steps: asked"),
        ({"scorer_options": {"objective": "loss", "k": 2}}, None, "structured, ntk (objective=loss, k=2), gamma 2.5: "),
    ],
)
def test_the_first_line_says_how(changes, compensation, first):
    made = report(config=report().config | changes, compensation=compensation)
    assert " ".join(str(made).split()).startswith(first)


def test_the_table():
    assert (
        str(report(warnings=["Few tokens."]))
        == """\
structured, ntk, gamma 2.5: asked 20.0%, achieved 27.1% of the targeted weights
layer     kv_group          mlp_channel
model.layers
0          3/4  #######...  16/24 ######....
1          4/4  ##########  16/24 ######....
2          4/4  ##########  16/24 ######....
all       11/12 #########.  48/72 ######....
asked     10.0%             25.0%
achieved  8.3%              33.3%
parameters 10,000 -> 9,000 (-10.0%)
took 1.2 s
calibration: org/texts:small, 32 samples, 4,096 tokens
warning: Few tokens."""
    )


def test_the_table_of_zeros():
    assert (
        str(masked())
        == """\
2:4, wanda, row: asked 50.0%, achieved 52.1% of the targeted weights
layer     weight
model.layers
0          56/128 ####......
1          64/128 #####.....
2          64/128 #####.....
all       184/384 ####......
asked     50.0%
achieved  52.1%
parameters 10,000 -> 10,000 (+0.0%)
In dense storage, zeros are kept and multiplied like any other weight: alone, they make a model
  neither smaller nor faster.
took 1.2 s
calibration: org/texts:small, 32 samples, 4,096 tokens"""
    )
    assert (masked().zeros, report().zeros) == (200, 0)


def test_a_linear_of_zeros_is_neither_dropped_nor_skipped():
    """One ranking of all weights may leave nothing of a linear, but the block still has it."""
    groups = [replace(group, after=0, weights_after=0) for group in masked().groups]
    assert masked(groups=groups).gone == {}
    assert not {"dropped_layers", "skipped"} & masked(groups=groups).record().keys()
    block = group("model.layers.1", 1, "layer", 1, 0, 50)
    assert report(groups=[block]).record()["dropped_layers"] == {"model.layers": [1]}


def test_a_layer_without_one_of_the_units_has_an_empty_cell():
    groups = [*report().groups, group("model.layers.3.mlp", 3, "mlp_channel", 24, 8, 50)]
    row = next(line for line in str(report(groups=groups)).splitlines() if line.startswith("3 "))
    assert row.split() == ["3", "8/24", "###......."]
    assert row.index("8/24") == str(report()).splitlines()[3].index("16/24") + 1


@given(
    counts=st.lists(st.integers(1, 200_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), min_size=1),
    source=st.text(min_size=1, max_size=300),
    warnings=st.lists(st.text(max_size=300)),
)
def test_the_table_fits_any_terminal(counts, source, warnings):
    groups = [
        group(f"g{i}.{unit}", i, unit, before, after, 1)
        for i, (after, before) in enumerate(counts)
        for unit in ("kv_group", "mlp_channel")
    ]
    text = str(report(groups=groups, calibration=DATA | {"source": source}, warnings=warnings))
    assert max(map(len, text.split("\n"))) <= WIDTH
    for (after, before), row in zip(counts, text.split("\n")[3:], strict=False):
        assert f"{after}/{before}" in row
        assert ("#" * 10 in row) == (after == before)


@pytest.mark.parametrize("name", ["org/model", "HuggingFaceTB/SmolLM2-135M-Instruct", "a/b.c-d_e"])
def test_hub_ids(name):
    assert is_hub_id(name)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "/org/model",
        "./model",
        "../a/b",
        "a/b/c",
        "C:\\a/b",
        "~/model",
        "data/texts.txt",
        "self",
        "",
        "a/b c",
        "a/",
    ],
)
def test_paths_and_words_are_no_hub_ids(name):
    assert not is_hub_id(name)


def test_a_folder_is_no_hub_id(tmp_path, monkeypatch):
    (tmp_path / "runs" / "dense").mkdir(parents=True)
    assert is_hub_id("runs/dense")
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("runs/dense")
    assert report(base_model="runs/dense").hub_base_model is None


def test_frozen_groups():
    with pytest.raises(AttributeError):
        report().groups[0].after = 1  # pyright: ignore[reportAttributeAccessIssue]
    assert replace(report().groups[0], after=1).after == 1


def test_reports_need_the_standard_library_only():
    code = "import sys, optimum_prune.report; print({'torch', 'transformers', 'yaml'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
