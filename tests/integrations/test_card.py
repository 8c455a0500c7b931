"""Model cards: valid, measured, and silent about what is not known."""

import ast
import math
import re
from dataclasses import replace

import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st

from optimum_prune.integrations.card import model_card
from tests.reports import DATA, DENSE, PRUNED, masked, recovery, report

BOTH = {"dense": DENSE, "pruned": PRUNED}


def blocks(card: ModelCard) -> dict[str, str]:
    """Return the fenced blocks of a card by language."""
    return dict(re.findall(r"```(\w+)\n(.*?)\n```", card.text, flags=re.DOTALL))


def sections(card: ModelCard) -> dict[str, str]:
    """Return the text under each heading."""
    _, *parts = re.split(r"^#+ (.*)$", card.text, flags=re.MULTILINE)
    return dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))


def test_metadata():
    card = model_card(
        report(), evaluations=BOTH, layout="compact", card_data={"license": "apache-2.0", "language": ["en"]}
    )
    metadata = card.data.to_dict()
    results = metadata.pop("model-index")
    assert metadata == {
        "base_model": "org/dense",
        "datasets": ["org/texts"],
        "language": ["en"],
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["pruned", "optimum_prune", "ntk", "structured"],
    }
    (entry,) = results
    assert entry["name"] == "dense-ntk20"
    (result,) = entry["results"]
    assert result["dataset"] == {
        "name": "org/texts:small",
        "type": "org/texts",
        "config": "small",
        "args": {key: value for key, value in DATA.items() if key != "source"},
    }
    assert {metric["type"]: metric["value"] for metric in result["metrics"]} == {
        "perplexity": 25.0,
        "kl_divergence": 0.75,
    }


def test_body():
    card = model_card(report(), evaluations=BOTH, layout="compact", file_bytes=36_100_000)
    text = " ".join(card.text.split())
    assert "`org/dense`, pruned with `optimum_prune`: of 10,000 parameters, 9,000 are left (36.1 MB of weight" in text
    assert "allocation `gamma` (MLP sparsity = gamma x attention sparsity, gamma 2.5)" in text
    assert "| `kv_group` | 10.0% | 8.3% | 11 of 12 |" in card.text
    assert "| all | 20.0% | 27.1% |  |" in card.text
    assert "| model.layers.0 | 3 of 4 | 16 of 24 |" in card.text
    assert "| perplexity | 12.50 | 25.00 | 2.00x |" in card.text
    assert "| decoding, per token | 10.0 ms | 9.0 ms | 0.90x |" in card.text
    assert "On org/texts:small, 32 samples, 4,096 tokens; cpu, float32, CPU threads: 2. Times are medians." in text
    assert "It is no promise" in text
    assert "NIRVANA" in sections(card)["Method"]
    assert "revision `0123abc`" in text
    assert f"`{DATA['fingerprint']}`" in text
    assert "Versions: optimum_prune 0.1.0, torch 2.13.0." in text
    assert report().fingerprint in text


def test_body_of_zeros():
    evaluations = {"dense": DENSE, "pruned": replace(DENSE, perplexity=20.0, kl=0.3, decode_ms_per_token=9.5)}
    card = model_card(masked(), evaluations=evaluations, layout="stock", file_bytes=40_000_000)
    text = " ".join(card.text.split())
    assert card.text.strip().startswith("# dense-wanda-2:4\n")
    assert (
        "of 10,000 parameters, 10,000 are left (40.0 MB of weight files). Of the targeted weights, 200 are zero, and "
        "stored like any other." in text
    )
    asked = " ".join(sections(card)["What was asked, what was achieved"].split())
    assert asked.startswith(
        "Pattern `2:4` (2 zeros in every 4 consecutive weights of a row), scorer `wanda`. Fractions are those of the "
        "targeted weights that were set to zero. A `weight` is one number in the matrix of a linear layer;"
    )
    assert "| `weight` | 50.0% | 52.1% | 184 of 384 |" in card.text
    assert "| model.layers.0 | 72 of 128 (56.2%) |" in card.text
    assert "| weights | 40.0 MB | 40.0 MB | 1.00x |" in card.text
    assert "Plain transformers, nothing else:" in card.text
    assert "allocation" not in card.text.partition("## How to reproduce")[0]
    assert {"2:4", "wanda", "pruned"} <= {*card.data["tags"]}


def test_options_compensation_and_steps_are_told():
    config = report().config | {"scorer_options": {"objective": "loss"}, "steps": 3}
    text = " ".join(str(model_card(report(config=config, compensation="bias"), evaluations={}, layout="stock")).split())
    assert "scorer `ntk` (`objective=loss`), allocation `gamma`" in text
    assert "compensation `bias`, in 3 steps." in text
    plain = str(model_card(report(), evaluations={}, layout="stock"))
    assert "scorer `ntk`, allocation" in plain and "compensation" not in plain and "steps" not in plain


@pytest.mark.parametrize("minute", [0, 12])
def test_models_that_were_timed_apart(minute):
    dense, pruned = (
        replace(found, timed_at=f"2026-01-01T10:{m:02}:00+00:00") for found, m in ((DENSE, 0), (PRUNED, minute))
    )
    card = str(model_card(report(), evaluations={"dense": dense, "pruned": pruned}, layout="stock"))
    note = "Times are medians. The latencies of the two models were measured 12 minutes apart, not in turn."
    assert (note in card) == bool(minute) and "Times are medians." in card


@pytest.mark.parametrize("measured", [{}, {"pruned": DENSE}, {"pruned": replace(DENSE, prefill_ms=None)}])
def test_zeros_promise_nothing(measured):
    """CASES.md 16: a size ratio of 1.00, what was measured, and no word of speed beside."""
    limits = {
        pattern: " ".join(sections(model_card(run, evaluations=measured, layout="stock"))["Limits"].split())
        for pattern in ("2:4", "4:8", "unstructured", "structured")
        for run in [masked(pattern) if pattern != "structured" else report()]
    }
    for pattern, text in limits.items():
        dense = "they make the files no smaller (size ratio 1.00), and the model no faster." in text
        assert dense == (pattern != "structured")
        assert ("NVIDIA" in text and "has to be measured there" in text) == (pattern == "2:4")
        assert "Fewer parameters" not in text or pattern == "structured"


@pytest.mark.parametrize(
    ("allocation", "words"),
    [
        ("row", "(ranked inside of every row of a matrix)"),
        ("matrix", "(ranked inside of every matrix)"),
        ("global", "(one ranking of all targeted weights)"),
    ],
)
def test_how_zeros_were_spread(allocation, words):
    card = model_card(masked("unstructured", allocation=allocation), evaluations={}, layout="stock")
    assert f"`unstructured`, scorer `wanda`, allocation `{allocation}` {words}. Fractions" in card.text
    assert card.text.strip().startswith("# dense-wanda50\n")


def test_tables_have_as_many_cells_in_every_row():
    card = model_card(report(), evaluations=BOTH, layout="stock")
    tables = re.findall(r"(?:^\|.*\|\n?)+", card.text, flags=re.MULTILINE)
    assert len(tables) == 3
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1


def test_many_layers_are_folded():
    def is_folded(layers):
        return "<details>" in model_card(report(layers=layers), evaluations={}, layout="stock").text

    assert not is_folded(12)
    assert is_folded(13)


def test_how_to_load():
    stock = model_card(report(), evaluations={}, layout="stock")
    compact = model_card(report(), evaluations={}, layout="compact")
    for card in (stock, compact):
        ast.parse(blocks(card)["python"])
    assert "optimum_prune" not in blocks(stock)["python"]
    assert blocks(compact)["python"].startswith("import optimum_prune")
    assert "pip install optimum-prune" in compact.text
    assert "ignore_mismatched_sizes" in compact.text
    assert "ignore_mismatched_sizes" not in stock.text


@pytest.mark.parametrize(
    ("architecture", "loader", "tag"),
    [
        ("LlamaForCausalLM", "AutoModelForCausalLM", "text-generation"),
        ("LlamaForSequenceClassification", "LlamaForSequenceClassification", "text-classification"),
        ("LlamaModel", "LlamaModel", None),
    ],
)
@pytest.mark.parametrize("layout", ["stock", "compact"])
def test_a_card_names_the_class_that_was_saved(architecture, loader, tag, layout):
    card = model_card(report(), evaluations={}, layout=layout, architecture=architecture)
    snippet = blocks(card)["python"]
    ast.parse(snippet)
    assert f"from transformers import {loader}, AutoTokenizer\n" in snippet
    assert f"model = {loader}.from_pretrained(" in snippet
    assert card.data.to_dict().get("pipeline_tag") == tag
    if architecture.endswith("ForCausalLM"):
        assert str(card) == str(model_card(report(), evaluations={}, layout=layout))


def test_a_model_that_was_pruned_before():
    first = report(parameters_before=20_000, parameters_after=15_000, config=report().config | {"scorer": "first"})
    second = report(parameters_before=15_000, parameters_after=10_000, config=report().config | {"scorer": "second"})
    third = report(base_model="/home/me/pruned", base_revision=None, previous=[first.record(), second.record()])
    card = model_card(third, evaluations={}, layout="compact")
    text = " ".join(card.text.split())
    assert "`org/dense`, pruned with `optimum_prune`: of 20,000 parameters, 9,000 are left." in text
    assert card.data["base_model"] == "org/dense"
    asked = " ".join(sections(card)["What was asked, what was achieved"].split())
    assert asked.startswith("This was cut number 3 of the model, and began with 10,000 parameters.")
    assert "about that cut alone. Pattern `structured`, scorer `ntk`" in asked
    recipes = re.findall(r"`(recipe-\d.yaml)`:\n\n```yaml\n(.*?)\n```", card.text, flags=re.DOTALL)
    assert [(name, yaml.safe_load(recipe)["scorer"]) for name, recipe in recipes] == [
        ("recipe-1.yaml", "first"),
        ("recipe-2.yaml", "second"),
        ("recipe-3.yaml", "ntk"),
    ]
    assert blocks(card)["bash"].splitlines() == [
        "optimum-cli prune run --model org/dense --output pruned-1 --recipe recipe-1.yaml",
        "optimum-cli prune run --model pruned-1 --output pruned-2 --recipe recipe-2.yaml",
        "optimum-cli prune run --model pruned-2 --output pruned --recipe recipe-3.yaml",
    ]
    assert "Dense model at revision `0123abc`" in text
    assert "Calibration data of cut number 3: org/texts" in text
    assert "cut number" not in model_card(report(), evaluations={}, layout="compact").text


def test_how_to_reproduce():
    card = model_card(report(), evaluations={}, layout="stock")
    assert yaml.safe_load(blocks(card)["yaml"]) == report().config
    expected = "optimum-cli prune run --model org/dense --output pruned --recipe recipe.yaml"
    assert blocks(card)["bash"] == expected
    assert "held in memory" not in card.text
    in_memory = report(calibration=DATA | {"source": "in-memory: 8 texts, sha256 0123456789abcdef"})
    card = model_card(in_memory, evaluations={}, layout="stock")
    assert "held in memory: the recipe names it" in card.text
    assert "datasets" not in card.data.to_dict()


TRAINED = {"rank": 8, "loss": "mix", "merge": "masked", "dataset": "org/texts:small"}


def test_numbers_from_before_a_training_are_none_of_the_model():
    both = {"dense": DENSE, "pruned": PRUNED}
    card = model_card(report(recovery=[recovery()]), evaluations=both, layout="stock")
    assert card.data.get("eval_results") is None
    assert "**Not measured since it was trained: these numbers are from before.**" in sections(card)["Measured"]
    assert "Nothing but the held-out losses above was measured" in sections(card)["Limits"]
    assert model_card(report(recovery=[recovery(kept=False)]), evaluations=both, layout="stock").data.get(
        "eval_results"
    )


@pytest.mark.parametrize("control", [None, recovery(config=TRAINED)])
def test_a_training_is_told_and_can_be_done_again(control):
    trained = report(recovery=[recovery(config=TRAINED, control=control)])
    both = {"dense": DENSE, "recovered": PRUNED} | ({} if control is None else {"control": DENSE})
    found = sections(model_card(trained, evaluations=both, layout="stock"))
    again = "prune recover --model pruned-1 --output pruned --recipe recipe-2.yaml --dense org/dense"
    assert again + (" --control" if control else "") + "\n" in found["How to reproduce"]
    assert ("`control` is the dense model" in found["Measured"]) == bool(control)
    assert ("how much of the gain is recovery" in found["Limits"]) != bool(control)
    assert "dense, trained alike" in found["What was trained after that"] or control is None


def test_no_column_is_explained_that_is_not_there():
    trained = report(recovery=[recovery(config=TRAINED, control=recovery(config=TRAINED, kept=False))])
    found = sections(model_card(trained, evaluations={"dense": DENSE, "recovered": PRUNED}, layout="stock"))
    assert "`control`" not in found["Measured"]


def test_zeros_that_a_merge_filled_are_not_promised():
    filled = recovery(config=TRAINED | {"merge": "plain"}, zeros_before=5_000, zeros_after=0)
    text = str(model_card(masked(recovery=[filled]), evaluations={}, layout="stock"))
    assert "The zeros that pruning left were filled again by training" in text
    assert "stored like any other" not in text and "multiplies zeros" not in text


@settings(deadline=None)
@given(
    evaluations=st.sampled_from(
        [
            {},
            {"dense": DENSE},
            {"pruned": PRUNED},
            BOTH,
            {"pruned": replace(PRUNED, kl=None, prefill_ms=None)},
        ]
    ),
    calibration=st.sampled_from([None, DATA]),
    gamma=st.sampled_from([None, {"model.layers": 3.0}]),
    base=st.sampled_from([(None, None), ("/home/me/dense", None), ("org/dense", "0123abc")]),
    warnings=st.sampled_from([[], ["Few tokens.", "A dead column."]]),
    layout=st.sampled_from(["stock", "compact"]),
    size=st.sampled_from([None, 1_000_000]),
    layers=st.sampled_from([1, 13]),
    cuts=st.sampled_from([1, 2, 3]),
    pattern=st.sampled_from(["structured", "unstructured", "2:4"]),
    architecture=st.sampled_from([None, "LlamaModel"]),
)
def test_whatever_is_missing_leaves_no_hole(
    evaluations, calibration, gamma, base, warnings, layout, size, layers, cuts, pattern, architecture
):
    before = report(calibration=calibration, base_model=base[0], base_revision=base[1]).record()
    changes = {
        "calibration": calibration,
        "base_model": base[0],
        "base_revision": base[1],
        "warnings": warnings,
        "previous": [before] * (cuts - 1),
    }
    structured = pattern == "structured"
    run = report(layers=layers, gamma=gamma, **changes) if structured else masked(pattern, **changes)
    card = model_card(run, evaluations=evaluations, layout=layout, architecture=architecture, file_bytes=size)
    again = ModelCard(str(card))
    assert str(again) == str(card)
    assert ("model-index" in again.data.to_dict()) == ("pruned" in evaluations)
    assert not re.search(r"None|\{\{|\{%|/home/me", str(card))
    assert not re.search(r"\n\n\n", card.text)
    assert all(text for title, text in sections(card).items())
    assert ("Measured" in sections(card)) == ("pruned" in evaluations)
    assert ("Nothing was measured" in card.text) != ("pruned" in evaluations)
    for warning in warnings:
        assert f"\n> {warning}\n" in card.text


def test_what_is_given_is_trusted_and_lists_are_added():
    given = {
        "base_model": "org/real",
        "tags": ["mine", "ntk"],
        "datasets": "org/pretraining",
        "license": "mit",
    }
    card = model_card(report(base_model="./local"), evaluations={}, layout="stock", card_data=given)
    assert card.data["base_model"] == "org/real"
    assert card.data["tags"] == ["mine", "ntk", "pruned", "optimum_prune", "structured"]
    assert card.data["datasets"] == ["org/pretraining", "org/texts"]
    assert "--model org/real " in card.text
    assert given["datasets"] == "org/pretraining"


def test_numbers_that_are_none_are_not_in_the_index():
    broken = replace(PRUNED, perplexity=math.inf, kl=math.nan)
    card = model_card(report(), evaluations={"pruned": broken}, layout="stock")
    assert "model-index" not in card.data.to_dict()
    assert "| perplexity | inf |" in card.text


def test_a_scorer_that_is_not_installed_has_no_reference():
    theirs = report(config=report().config | {"scorer": "theirs"})
    card = model_card(theirs, evaluations={}, layout="stock")
    assert "Method" not in sections(card)
    assert "Method" in sections(model_card(report(), evaluations={}, layout="stock"))


def test_no_path_of_a_machine_is_published():
    path = "/home/me/text.txt"
    data = DATA | {"source": path}
    config = report().config | {"calibration": {"source": path}}
    run = report(config=config, calibration=data, base_model="/home/me/dense", base_revision=None)
    card = model_card(run, evaluations={"pruned": replace(PRUNED, data=data)}, layout="stock")
    assert "/home" not in str(card)
    assert "On text.txt, 32 samples" in card.text
    assert "datasets" not in card.data.to_dict()


def test_the_same_inputs_give_the_same_card(tmp_path, monkeypatch):
    first = str(model_card(report(), evaluations=BOTH, layout="stock"))
    monkeypatch.chdir(tmp_path)
    assert str(model_card(report(), evaluations=BOTH, layout="stock")) == first
