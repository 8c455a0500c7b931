"""The two configurations: what they accept, what they refuse and how, and that files lose nothing."""

import copy
import json
import re
import warnings
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import yaml
from datasets import Dataset, DatasetDict, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from optimum_prune import registry
from optimum_prune.config import IN_MEMORY, LAYER_UNITS, UNITS, CalibrationConfig, PruningConfig
from optimum_prune.errors import InvalidConfig
from optimum_prune.options import read_recipe

# Strategies

NAMES = st.text(min_size=1)
COUNTS = st.integers(min_value=1, max_value=2**40)
SEEDS = st.integers(min_value=0, max_value=2**63 - 1)
PATTERNS = st.none() | st.lists(NAMES, min_size=1, max_size=3, unique=True)

CALIBRATIONS = st.builds(
    CalibrationConfig,
    source=NAMES,
    num_samples=COUNTS,
    seq_len=st.none() | COUNTS,
    batch_size=COUNTS,
    seed=SEEDS,
    split=NAMES,
    text_column=st.none() | NAMES.map("text {}".format),  # never the same as that of answers
    target_column=st.none() | NAMES.map("answer {}".format),
    image_column=st.none() | NAMES,
)


@st.composite
def prunings(draw: st.DrawFn) -> PruningConfig:
    allocation = draw(st.sampled_from(["auto", "uniform", "global", "gamma"]))
    gammas: st.SearchStrategy[Any] = st.just("auto")
    if allocation in ("auto", "gamma"):
        gammas |= st.floats(min_value=0, exclude_min=True, allow_infinity=False)
    return PruningConfig(
        scorer=draw(st.sampled_from(registry.available("scorers"))),
        sparsity=draw(st.floats(min_value=0, max_value=1, exclude_max=True)),
        allocation=allocation,
        gamma=draw(gammas),
        units=draw(st.none() | st.lists(st.sampled_from(list[str](UNITS)), min_size=1, unique=True)),
        include=draw(PATTERNS),
        exclude=draw(PATTERNS),
        round_to=draw(COUNTS),
        calibration=draw(CALIBRATIONS),
        seed=draw(SEEDS),
    )


@st.composite
def depth_prunings(draw: st.DrawFn) -> PruningConfig:
    sublayers = st.lists(st.sampled_from(["attention", "mlp"]), min_size=1, unique=True)
    return PruningConfig(
        pattern="layers",
        scorer=draw(st.sampled_from(["block_influence", "random"])),
        sparsity=draw(st.floats(min_value=0, max_value=1, exclude_max=True)),
        allocation=draw(st.sampled_from(["auto", "global"])),
        units=draw(st.none() | st.just(["layer"]) | sublayers),
        include=draw(PATTERNS),
        exclude=draw(PATTERNS),
        keep_first=draw(st.integers(min_value=0, max_value=2**40)),
        keep_last=draw(st.integers(min_value=0, max_value=2**40)),
        calibration=draw(CALIBRATIONS),
        seed=draw(SEEDS),
    )


@st.composite
def mask_prunings(draw: st.DrawFn) -> PruningConfig:
    fractions = st.floats(min_value=0, max_value=1, exclude_max=True)
    m = draw(st.integers(2, 64))
    n = draw(st.integers(1, m - 1))
    pattern = draw(st.sampled_from(["unstructured", f"{n}:{m}"]))
    free = pattern == "unstructured"
    sparsity: st.SearchStrategy[Any] = fractions | st.dictionaries(NAMES, fractions, min_size=1, max_size=3)
    return PruningConfig(
        pattern=pattern,
        scorer=draw(st.sampled_from(["magnitude", "random", "wanda", "sparsegpt", "admm"])),
        sparsity=draw(sparsity if free else st.sampled_from([None, n / m])),
        allocation=draw(st.sampled_from(["auto", "row", "matrix", "global"] if free else ["auto"])),
        stacks=draw(PATTERNS),
        include=draw(PATTERNS),
        exclude=draw(PATTERNS),
        calibration=draw(CALIBRATIONS),
        seed=draw(SEEDS),
    )


CONFIGS = CALIBRATIONS | prunings() | depth_prunings() | mask_prunings()
UNTIMED = settings(deadline=None)  # a busy machine is no failure


def pruning(**changes: Any) -> PruningConfig:
    values: dict[str, Any] = {"sparsity": 0.2} | changes
    return PruningConfig(**values)


# Round trips


@UNTIMED
@given(CONFIGS)
def test_dict_round_trip(config):
    data = config.to_dict()
    before = copy.deepcopy(data)
    assert type(config).from_dict(data) == config
    assert data == before
    assert data["version"] == 1


@UNTIMED
@given(CONFIGS)
def test_a_dict_is_plain_json(config):
    assert json.loads(json.dumps(config.to_dict(), allow_nan=False)) == config.to_dict()


@UNTIMED
@given(CONFIGS, st.sampled_from(["yaml", "json"]))
def test_file_round_trip(config, kind):
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"recipe.{kind}"
        getattr(config, f"to_{kind}")(path)
        assert getattr(type(config), f"from_{kind}")(path) == config
        assert type(config).from_file(str(path)) == config


@UNTIMED
@given(CONFIGS)
def test_repr_builds_the_same(config):
    assert eval(repr(config)) == config


@pytest.mark.parametrize("word", ["2:4", "null", "yes", "1e3", "0x10", "~", "- a", "# b", "é", "\u2028", "\x85", "\0"])
def test_words_that_yaml_could_take_for_something_else(word, tmp_path):
    config = pruning(include=[word], calibration=CalibrationConfig(source=word))
    config.to_yaml(tmp_path / "recipe.yaml")
    assert PruningConfig.from_yaml(tmp_path / "recipe.yaml") == config


def test_a_recipe_by_hand_needs_no_version_and_no_more_than_it_says(tmp_path):
    (tmp_path / "r.yml").write_text("sparsity: 0.5\nunits: mlp_channel\ncalibration: {source: text.txt}\n")
    assert PruningConfig.from_file(tmp_path / "r.yml") == PruningConfig(
        sparsity=0.5, units=["mlp_channel"], calibration=CalibrationConfig("text.txt")
    )


def test_a_written_recipe_is_in_the_order_of_the_fields(tmp_path):
    pruning().to_yaml(tmp_path / "r.yaml")
    written = yaml.safe_load((tmp_path / "r.yaml").read_text())
    assert list(written) == ["version", *(field.name for field in fields(PruningConfig))]


# What is kept


def test_defaults():
    assert PruningConfig(sparsity=0.2) == PruningConfig(
        pattern="structured",
        scorer="taylor",
        sparsity=0.2,
        allocation="auto",
        gamma="auto",
        units=None,
        include=None,
        exclude=None,
        round_to=8,
        scorer_options=None,
        compensation="auto",
        steps=1,
        calibration=CalibrationConfig("self", 32, None, 4, 0, "train", None, None, None, "none", 8),
        seed=0,
    )
    assert PruningConfig.quant_method == "optimum_prune"


def test_defaults_of_layers():
    assert pruning(pattern="layers") == pruning(
        pattern="layers", scorer="block_influence", units=None, keep_first=1, keep_last=1
    )


@pytest.mark.parametrize("pattern", ["2:4", "1:3", "4:8", "unstructured"])
def test_defaults_of_zeros(pattern):
    sparsity = 0.2 if pattern == "unstructured" else None
    assert pruning(pattern=pattern, sparsity=sparsity) == pruning(
        pattern=pattern, sparsity=sparsity, scorer="sparsegpt", allocation="auto", units=None, round_to=8
    )


@pytest.mark.parametrize(
    ("pattern", "kind", "n_of_m"),
    [
        ("2:4", "n:m", (2, 4)),
        ("15:16", "n:m", (15, 16)),
        ("unstructured", "unstructured", None),
        ("layers", "layers", None),
    ],
)
def test_kinds_of_pattern(pattern, kind, n_of_m):
    config = pruning(pattern=pattern, sparsity=None if n_of_m else 0.5)
    assert (config.kind, config.n_of_m) == (kind, n_of_m)


def test_the_sparsity_of_n_of_m_may_be_repeated():
    assert [pruning(pattern="1:3", sparsity=s).sparsity for s in (1 / 3, None)] == [1 / 3, None]


def test_a_fraction_for_each_pattern(tmp_path):
    """Numbers of any kind become plain, and the mapping is a copy."""
    shares = {"*.mlp": np.float64(0.5), "model.layers.0": 0}
    config = pruning(pattern="unstructured", sparsity=shares)
    shares["*.mlp"] = 0.9
    assert config.sparsity == {"*.mlp": 0.5, "model.layers.0": 0.0}
    (tmp_path / "r.yaml").write_text("pattern: unstructured\nsparsity:\n  '*.mlp': 0.5\n  model.layers.0: 0\n")
    assert PruningConfig.from_file(tmp_path / "r.yaml") == replace(config, scorer="sparsegpt")


def test_a_recipe_quotes_its_n_of_m(tmp_path):
    """YAML 1.1 reads 2:4 as the number 124."""
    config = pruning(pattern="2:4", sparsity=None, scorer="wanda")
    config.to_yaml(tmp_path / "r.yaml")
    assert "pattern: '2:4'\n" in (tmp_path / "r.yaml").read_text()
    assert PruningConfig.from_file(tmp_path / "r.yaml") == config
    (tmp_path / "r.yaml").write_text('pattern: "2:4"\nscorer: wanda\n')
    assert PruningConfig.from_file(tmp_path / "r.yaml") == config


@pytest.mark.parametrize(
    ("pattern", "scorer"), [("structured", "taylor"), ("layers", "block_influence"), ("unstructured", "sparsegpt")]
)
def test_the_recommended_scorer_is_written_by_name(pattern, scorer):
    for options in ({}, {"scorer": None}):
        config = pruning(pattern=pattern, **options)
        assert config.scorer == config.to_dict()["scorer"] == scorer


@pytest.mark.parametrize("units", [*LAYER_UNITS, ["attention", "mlp"]])
def test_units_of_layers(units):
    assert pruning(pattern="layers", units=units).units == ([units] if isinstance(units, str) else units)


def test_nothing_removed_is_legal():
    assert pruning(sparsity=0).sparsity == 0.0


@pytest.mark.parametrize("name", ["units", "include", "exclude"])
@pytest.mark.parametrize("given_as", ["kv_group", ["kv_group"], ("kv_group",)])
def test_one_string_is_a_list_of_one(name, given_as):
    assert getattr(pruning(**{name: given_as}), name) == ["kv_group"]


def test_calibration_may_be_a_dict():
    assert pruning(calibration={"num_samples": 8}).calibration == CalibrationConfig(num_samples=8)


def test_numbers_of_numpy_become_plain():
    config = pruning(sparsity=np.float32(0.25), round_to=np.int64(4), seed=np.int32(1), gamma=np.float64(2))
    assert config == pruning(sparsity=0.25, round_to=4, seed=1, gamma=2.0)
    json.dumps(config.to_dict())


def test_a_path_becomes_a_string(tmp_path):
    assert CalibrationConfig(tmp_path / "text.txt").source == str(tmp_path / "text.txt")


@pytest.mark.parametrize("config", [pruning(), CalibrationConfig()])
def test_a_config_is_frozen(config):
    with pytest.raises(FrozenInstanceError):
        config.seed = 3


def test_a_copy_is_checked_as_well():
    config = pruning()
    assert copy.deepcopy(config) == config
    assert replace(config, sparsity=0.3) == pruning(sparsity=0.3)
    with pytest.raises(InvalidConfig, match=r"sparsity must be in \[0, 1\), got 3\."):
        replace(config, sparsity=3)
    with pytest.raises(InvalidConfig, match="Did you mean 'sparsity'"):
        replace(config, sparsitty=0.3)


def test_every_field_has_a_line_of_help():
    for field in (*fields(PruningConfig), *fields(CalibrationConfig)):
        assert len(field.metadata["help"]) > 20, field.name


# Sources that live in memory

TEXTS = ["a text that must not be written", "another"]
TOKENS = [[41, 42, 43], [44]]


@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        (TEXTS, r"in-memory: 2 texts, sha256 [0-9a-f]{16}"),
        (TOKENS, r"in-memory: 2 token lists, sha256 [0-9a-f]{16}"),
        ([np.arange(3).tolist()], r"in-memory: 1 token lists, sha256 [0-9a-f]{16}"),
        ([list(np.arange(3))], r"in-memory: 1 token lists, sha256 [0-9a-f]{16}"),
        (Dataset.from_dict({"text": TEXTS, "label": [0, 1]}), "in-memory: Dataset, columns: text, label"),
        (
            Dataset.from_dict({"text": TEXTS}).to_iterable_dataset(),
            "in-memory: IterableDataset, columns: text",
        ),
        (  # its columns are not known before it is read
            IterableDataset.from_generator(lambda: iter([{"text": TEXTS[0]}])),
            "in-memory: IterableDataset, columns: unknown",
        ),
    ],
)
def test_data_in_memory_is_described_and_never_written(source, pattern):
    config = pruning(calibration=CalibrationConfig(source))
    assert config.calibration.source == source
    written = config.to_dict()["calibration"]["source"]
    assert re.fullmatch(pattern, written)
    assert written in repr(config)
    assert "must not be written" not in repr(config) + json.dumps(config.to_dict())
    reread = PruningConfig.from_dict(config.to_dict())  # raises only when the data is asked for
    assert reread.calibration.source == written
    assert written.startswith(IN_MEMORY)


def test_the_description_tells_data_apart():
    written = [CalibrationConfig(source).to_dict()["source"] for source in (TEXTS, list(TEXTS), TEXTS[::-1])]
    assert written[0] == written[1] != written[2]


def test_the_list_of_the_caller_may_change_later():
    texts = list(TEXTS)
    config = CalibrationConfig(texts)
    texts.append("later")
    assert config.source == TEXTS


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "source must be a dataset id, a file or folder, .*, got ''."),
        ([], "source must be a dataset id, .* or 'self', got []."),
        (None, "source must be a dataset id, .*, got None."),
        (3, "source must be a dataset id, .*, got 3."),
        (["text", [1, 2]], "source must hold only strings, or only lists of token ids; it mixes .*"),
        ([[1, 2], ["text"]], "source must hold only strings, or only lists of token ids"),
        ([[True]], "source must hold only strings, or only lists of token ids"),
        ([1, 2, 3], "source must hold only strings, or only lists of token ids"),
        (
            DatasetDict({"train": Dataset.from_dict({"text": TEXTS})}),
            "source must be one dataset; choose one of ['train']",
        ),
        ({}, "source must be a dataset id, .*, got {}."),
    ],
)
def test_sources_that_cannot_be_meant(source, message):
    with pytest.raises(InvalidConfig, match=loosely(message)):
        CalibrationConfig(source)


# What is refused


def loosely(message: str) -> str:
    """Return a regular expression of a message in which only `.*` is special."""
    return ".*".join(map(re.escape, message.split(".*")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparsity": 1.5}, "sparsity must be in [0, 1), got 1.5."),
        ({"sparsity": 1.0}, "sparsity must be in [0, 1), got 1.0."),
        ({"sparsity": 1}, "sparsity must be in [0, 1), got 1."),
        ({"sparsity": -0.1}, "sparsity must be in [0, 1), got -0.1."),
        ({"sparsity": float("nan")}, "sparsity must be in [0, 1), got nan."),
        ({"sparsity": float("inf")}, "sparsity must be in [0, 1), got inf."),
        ({"sparsity": 10**400}, "sparsity must be in [0, 1), got 1000"),
        ({"gamma": 10**400}, "gamma must be 'auto' or a finite number > 0, got 1000"),
        *(
            ({name: np.arange(2)}, f"Unknown {name} array([0, 1]); supported: ")
            for name in ("scorer", "allocation", "compensation")
        ),
        ({"sparsity": False}, "sparsity must be in [0, 1), got False."),
        ({"sparsity": "0.2"}, "sparsity must be in [0, 1), got '0.2'."),
        ({"sparsity": None}, "sparsity is required: the fraction of .* to remove, in [0, 1)."),
        ({"pattern": "4:2"}, "pattern '4:2' is no n:m: n of every m .* are removed, so 0 < n < m."),
        ({"pattern": "0:4"}, "pattern '0:4' is no n:m: .* so 0 < n < m."),
        ({"pattern": "4:4"}, "pattern '4:4' is no n:m: .* so 0 < n < m."),
        (
            {"pattern": "2:4", "sparsity": 0.9},
            "sparsity=0.9 conflicts with pattern '2:4', which removes exactly 2 of .*; leave sparsity out.",
        ),
        ({"pattern": "1:3", "sparsity": 0.33}, "sparsity=0.33 conflicts with pattern '1:3'"),
        ({"pattern": "2:4", "sparsity": 0.0}, "sparsity=0.0 conflicts with pattern '2:4'"),
        ({"pattern": "2:4", "sparsity": {"*.mlp": 0.5}}, "sparsity={'*.mlp': 0.5} conflicts with pattern '2:4'"),
        ({"pattern": "unstructured", "sparsity": None}, "sparsity is required"),
        ({"sparsity": {"*": 0.5}}, "Pattern 'structured' has one sparsity for all: a number, not a mapping."),
        ({"pattern": "layers", "sparsity": {"*": 0.5}}, "Pattern 'layers' has one sparsity for all"),
        (
            {"pattern": "unstructured", "sparsity": {}},
            "sparsity must be a fraction, or a non-empty mapping .*, got {}.",
        ),
        ({"pattern": "unstructured", "sparsity": {3: 0.5}}, "sparsity must be a fraction, or a non-empty mapping"),
        ({"pattern": "unstructured", "sparsity": {"": 0.5}}, "sparsity must be a fraction, or a non-empty mapping"),
        ({"pattern": "unstructured", "sparsity": {"a": 1.5}}, "sparsity['a'] must be in [0, 1), got 1.5."),
        ({"pattern": "unstructured", "sparsity": {"a": 0.1, "b": None}}, "sparsity['b'] must be in [0, 1), got None."),
        ({"pattern": "unstructured", "sparsity": [0.5]}, "sparsity must be in [0, 1), got [0.5]."),
        (
            {"pattern": "structurd"},
            "Unknown pattern 'structurd'; supported: 'structured', 'layers', 'unstructured', 'n:m'. Did you mean "
            "'structured'?",
        ),
        ({"pattern": "2:4:8"}, "Unknown pattern '2:4:8'; supported: .* 'n:m'."),
        ({"pattern": "n:m"}, "Unknown pattern 'n:m'; supported: .*"),
        ({"pattern": "-2:4"}, "Unknown pattern '-2:4'; supported: .*"),
        ({"pattern": 124}, 'pattern must be a string (in YAML, quote it: "2:4"), got 124.'),
        ({"scorer": "magnitud"}, "Unknown scorer 'magnitud'; supported: .*. Did you mean 'magnitude'?"),
        ({"scorer": 3}, "Unknown scorer 3; supported: .*."),
        (
            {"allocation": "globl"},
            "Unknown allocation 'globl'; supported: 'auto', .*. Did you mean 'global'?",
        ),
        ({"gamma": 0}, "gamma must be 'auto' or a finite number > 0, got 0."),
        ({"gamma": float("inf")}, "gamma must be 'auto' or a finite number > 0, got inf."),
        ({"gamma": "best"}, "gamma must be 'auto' or a finite number > 0, got 'best'."),
        (
            {"gamma": 3, "allocation": "uniform"},
            "gamma=3.0 has no meaning .*'uniform'; use allocation='gamma'.",
        ),
        ({"gamma": 3, "allocation": "global"}, "gamma=3.0 has no meaning with allocation='global'"),
        ({"units": ["mlp_chanel"]}, "Unknown unit 'mlp_chanel'; .* Did you mean 'mlp_channel'?"),
        ({"units": []}, "units must be None or a non-empty list of kinds of unit, got []."),
        (
            {"units": ["kv_group", "kv_group"]},
            "units must be free of repetitions, got ['kv_group', 'kv_group'].",
        ),
        ({"include": []}, "include must be None or a non-empty list of glob patterns, got []."),
        ({"exclude": ""}, "exclude must be None or a non-empty list of glob patterns, got ''."),
        ({"exclude": ["a", ""]}, "exclude must be None or a non-empty list of glob patterns, got ['a', '']."),
        ({"exclude": {"a": 1}}, "exclude must be None or a non-empty list of glob patterns, got {'a': 1}."),
        ({"exclude": [np.arange(3)]}, "exclude must be None or a non-empty list of glob patterns, got .*"),
        (
            {"units": ["layer"]},
            "units=['layer'] do not go with pattern 'structured', whose units are 'kv_group', 'mlp_channel'.",
        ),
        (
            {"pattern": "layers", "units": ["attention", "kv_group"]},
            "units=['attention', 'kv_group'] do not go with pattern 'layers', whose units are 'layer', .*",
        ),
        (
            {"pattern": "layers", "units": ["layer", "mlp"]},
            "units=['layer', 'mlp'] would remove blocks and parts of them at once. Drop 'layer' first, then skip .*",
        ),
        ({"pattern": "layers", "units": ["atention"]}, "Unknown unit 'atention'; .* Did you mean 'attention'?"),
        (
            {"pattern": "layers", "round_to": 4},
            "round_to=4 has no meaning with pattern 'layers': only whole blocks or sub-layers go.",
        ),
        (
            {"pattern": "layers", "gamma": 2.0},
            "gamma=2.0 has no meaning with pattern 'layers': attention and MLPs lose the same fraction of .*",
        ),
        (
            {"pattern": "layers", "allocation": "uniform"},
            "allocation='uniform' has no meaning with pattern 'layers'; possible: 'auto', 'global'.",
        ),
        (
            {"pattern": "unstructured", "allocation": "uniform"},
            "allocation='uniform' has no meaning with pattern 'unstructured'; possible: 'auto', 'row', 'matrix', .*",
        ),
        (
            {"allocation": "row"},
            "allocation='row' has no meaning with pattern 'structured'; possible: 'auto', 'uniform', ",
        ),
        (
            {"pattern": "2:4", "sparsity": None, "allocation": "row"},
            "allocation='row' has no meaning with pattern '2:4'; possible: 'auto'.",
        ),
        *(
            (
                {"pattern": "2:4", "sparsity": None} | changes,
                f"{name}={value!r} has no meaning with pattern '2:4': {reason}",
            )
            for changes, reason in [
                ({"units": ["kv_group"]}, "single weights go, not units; choose linears by include and exclude."),
                ({"units": ["layer"]}, "single weights go"),
                ({"gamma": 2.0}, "every linear loses the fraction that is asked of it."),
                ({"round_to": 4}, "shapes stay as they are."),
                ({"keep_first": 0}, "blocks stay; leave linears alone by exclude."),
                ({"keep_last": 2}, "blocks stay"),
            ]
            for name, value in changes.items()
        ),
        ({"pattern": "unstructured", "units": ["mlp"]}, "units=['mlp'] has no meaning with pattern 'unstructured'"),
        ({"pattern": "layers", "allocation": "gamma"}, "allocation='gamma' has no meaning with pattern 'layers'"),
        (
            {"keep_first": 2},
            "keep_first=2 has no meaning with pattern 'structured': every block keeps some of its units.",
        ),
        ({"keep_last": 0}, "keep_last=0 has no meaning with pattern 'structured'"),
        ({"pattern": "layers", "keep_first": -1}, "keep_first must be an integer >= 0, got -1."),
        ({"pattern": "layers", "keep_last": True}, "keep_last must be an integer >= 0, got True."),
        ({"pattern": "layers", "sparsity": None}, "sparsity is required"),
        ({"round_to": 0}, "round_to must be an integer >= 1, got 0."),
        ({"round_to": 8.0}, "round_to must be an integer >= 1, got 8.0."),
        ({"round_to": None}, "round_to must be an integer >= 1, got None."),
        ({"seed": -1}, "seed must be an integer >= 0, got -1."),
        ({"seed": True}, "seed must be an integer >= 0, got True."),
        ({"seed": 2**63}, "seed must be an integer >= 0, got 9223372036854775808."),
        ({"calibration": None}, "calibration must be a CalibrationConfig or a mapping, got None."),
        ({"calibration": "self"}, "calibration must be a CalibrationConfig or a mapping, got 'self'."),
        (
            {"calibration": {"num_sample": 8}},
            "Unknown CalibrationConfig field 'num_sample'; .*'num_samples'?",
        ),
        ({"calibration": {"num_samples": 0}}, "num_samples must be an integer >= 1, got 0."),
        ({"sparsitty": 0.2}, "Unknown PruningConfig field 'sparsitty'; .* Did you mean 'sparsity'?"),
    ],
)
def test_pruning_values(changes, message):
    with pytest.raises(InvalidConfig, match=loosely(message)):
        pruning(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 0}, "num_samples must be an integer >= 1, got 0."),
        ({"num_samples": None}, "num_samples must be an integer >= 1, got None."),
        ({"seq_len": 0}, "seq_len must be an integer >= 1, got 0."),
        ({"seq_len": "128"}, "seq_len must be an integer >= 1, got '128'."),
        ({"batch_size": 1.5}, "batch_size must be an integer >= 1, got 1.5."),
        ({"seed": -1}, "seed must be an integer >= 0, got -1."),
        ({"split": ""}, "split must be a non-empty string, got ''."),
        ({"split": None}, "split must be a non-empty string, got None."),
        ({"text_column": 3}, "text_column must be a non-empty string, got 3."),
        ({"target_column": ""}, "target_column must be a non-empty string, got ''."),
        ({"image_column": ["image"]}, "image_column must be a non-empty string, got ['image']."),
        ({"sample": 8}, "Unknown CalibrationConfig field 'sample'; supported: 'source', .*"),
    ],
)
def test_calibration_values(changes, message):
    with pytest.raises(InvalidConfig, match=loosely(message)):
        CalibrationConfig(**changes)


def test_the_nearest_scorer_is_suggested(monkeypatch):
    monkeypatch.setattr(registry, "available", lambda kind: ["ntk", "wanda"])
    with pytest.raises(InvalidConfig, match=loosely("Unknown scorer 'wandaa'; .* Did you mean 'wanda'?")):
        pruning(scorer="wandaa")


def test_a_refusal_stays_readable():
    with pytest.raises(InvalidConfig) as refused:
        pruning(include=list(range(10_000)))
    assert len(str(refused.value)) < 200


# Versions and files


@pytest.mark.parametrize("kind", [CalibrationConfig, PruningConfig])
def test_a_field_of_a_newer_version_is_ignored_with_a_warning(kind):
    config = kind(**{"sparsity": 0.2} if kind is PruningConfig else {})
    data = config.to_dict() | {"version": 2, "hyperdrive": True}
    with pytest.warns(UserWarning, match=f"{kind.__name__} was .* newer version .* ignored: 'hyperdrive'"):
        assert kind.from_dict(data) == config


def test_a_newer_version_without_new_fields_is_read_in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert PruningConfig.from_dict(pruning().to_dict() | {"version": 2}) == pruning()


def test_a_newer_calibration_inside():
    data = pruning().to_dict()
    data["calibration"] |= {"version": 2, "hyperdrive": True}
    with pytest.warns(UserWarning, match="CalibrationConfig was written by a newer version"):
        assert PruningConfig.from_dict(data) == pruning()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"sparsity": 0.2, "scorrer": "ntk"},
            "Unknown PruningConfig field 'scorrer'; .* Did you mean 'scorer'?",
        ),
        ({"sparsity": 0.2, "version": 1, "hyperdrive": 1}, "Unknown PruningConfig field 'hyperdrive'"),
        ({"sparsity": 0.2, 3: 4}, "Unknown PruningConfig field 3"),
        ({"sparsity": 0.2, "version": "2"}, "version must be an integer >= 1, got '2'."),
        ({"sparsity": 0.2, "version": 0}, "version must be an integer >= 1, got 0."),
        ([1, 2], "PruningConfig must be a mapping of fields, got [1, 2]."),
        (None, "PruningConfig must be a mapping of fields, got None."),
    ],
)
def test_dicts_that_cannot_be_read(data, message):
    with pytest.raises(InvalidConfig, match=loosely(message)):
        PruningConfig.from_dict(data)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.yaml", None, "Recipe '.*r.yaml' cannot be read: No such file or directory."),
        ("r.yaml", b"a: [1", "Recipe '.*r.yaml' is not valid yaml: "),
        ("r.json", b"{", "Recipe '.*r.json' is not valid json: "),
        ("r.json", b"\xff", "Recipe '.*r.json' is not valid json: "),
        ("r.yaml", b"a\0b: 1", "Recipe '.*r.yaml' is not valid yaml: "),
        ("r.yaml", b"seed: 1\nseed: 2", "Recipe '.*r.yaml' is not valid yaml: 'seed' is there twice."),
        ("r.yaml", b"calibration: {seed: 1, seed: 1}", "Recipe '.*r.yaml' is not valid yaml: 'seed' is there twice."),
        ("r.json", b'{"a": {"seed": 1, "seed": 2}}', "Recipe '.*r.json' is not valid json: 'seed' is there twice."),
        ("r.yaml", b"", "Recipe '.*r.yaml' must hold a mapping of fields, got None."),
        ("r.json", b"[1]", "Recipe '.*r.json' must hold a mapping of fields, got [1]."),
        ("r.toml", b"a = 1", "A recipe must end in .yaml, .yml or .json, got 'r.toml'."),
        ("r.yaml", b"pattern: 2:4", 'pattern must be a string (in YAML, quote it: "2:4"), got 124.'),
        ("r.yaml", b"!!python/object/apply:os.getcwd []", "Recipe '.*r.yaml' is not valid yaml: "),
    ],
)
def test_files_that_cannot_be_read(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidConfig, match=loosely(message)):
        PruningConfig.from_file(tmp_path / name)


def test_a_recipe_may_share_fields_by_yamls_own_means(tmp_path):
    (tmp_path / "r.yaml").write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}")
    assert read_recipe(tmp_path / "r.yaml")["b"] == {"x": 1, "y": 3}


def test_reading_a_recipe_checks_nothing_in_it(tmp_path):
    (tmp_path / "r.json").write_text('{"sparsity": 7}')
    assert read_recipe(tmp_path / "r.json") == {"sparsity": 7}
