"""Compact T5 checkpoints: other heads, and sizes that somebody edited."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false

import json

import pytest
from transformers import (
    T5ForConditionalGeneration,
    T5ForQuestionAnswering,
    T5ForSequenceClassification,
    T5ForTokenClassification,
)

from optimum_prune import CheckpointError, PruningConfig
from optimum_prune.pipeline import prune
from tests.models import t5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compact")
    model = t5()
    prune(model, PruningConfig(scorer="magnitude", sparsity=0.4, allocation="global", round_to=1))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("head", [T5ForSequenceClassification, T5ForTokenClassification, T5ForQuestionAnswering])
def test_a_compact_t5_gets_another_head(folder, head):
    """As from a stock checkpoint, where transformers says which weights are new."""
    model, info = head.from_pretrained(folder, output_loading_info=True)
    blocks = [name for name in info["missing_keys"] if ".block." in name]
    assert blocks == [] and not info["mismatched_keys"]
    assert len({len(block.layer[-1].DenseReluDense.wi.weight) for block in _encoder(model).block}) > 1


def _encoder(model):
    return getattr(model, "transformer", model).encoder


@pytest.mark.parametrize("edit", [{"d_ff": "40"}, {"d_ff": None}, {"d_ff": 27.0}])
def test_a_size_that_is_no_integer_is_refused_by_name(folder, tmp_path, edit):
    T5ForConditionalGeneration.from_pretrained(folder).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["per_layer"]["encoder.block"]["0"] |= edit
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"encoder\.block\.0.* d_ff=.* no number of units"):
        T5ForConditionalGeneration.from_pretrained(tmp_path)
