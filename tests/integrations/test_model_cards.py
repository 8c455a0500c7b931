"""The cards in `model_cards/`: each is what its report says, and nothing was written by hand."""

import re

import pytest

from optimum_prune import Pruner, PruningConfig
from tests.model_cards import CARDS, card, copy
from tests.models import llama, source
from tests.words import tokenizer

EXAMPLES = sorted(path.parent for path in CARDS.glob("*/card.json"))


def test_there_are_some():
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_written_again(folder):
    assert card(folder) == (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_pictures_are_there(folder):
    shown = re.findall(r"!\[[^]]+\]\(([^)]+)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert shown
    assert all((folder / picture).is_file() for picture in shown)


def test_a_copy_says_what_the_saved_card_says(tmp_path):
    pruner = Pruner(llama(), tokenizer())
    pruner.prune(PruningConfig(scorer="magnitude", sparsity=0.3, allocation="global", round_to=1))
    pruner.evaluate(source(pruner.model), latency=False)
    pruner.save_pretrained(tmp_path / "saved", card_data={"base_model": "me/dense", "license": "mit"})
    copy(tmp_path / "saved", tmp_path / "card")
    saved = (tmp_path / "saved" / "README.md").read_text(encoding="utf-8")
    assert (tmp_path / "card" / "README.md").read_text(encoding="utf-8") == saved
