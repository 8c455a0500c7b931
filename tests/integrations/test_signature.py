"""Cards know whether somebody edited them."""

import pytest
from huggingface_hub import ModelCard

from optimum_prune.integrations.card import model_card
from optimum_prune.integrations.signature import is_ours, sign_, spare_name
from tests.reports import DENSE, PRUNED, report


def written():
    return str(model_card(report(), evaluations={"dense": DENSE, "pruned": PRUNED}, layout="compact"))


def test_a_card_as_it_was_written():
    card = written()
    assert is_ours(card)
    assert card.count("<!-- Written by optimum_prune") == 1
    assert ModelCard(card).data.to_dict()["library_name"] == "transformers"


@pytest.mark.parametrize("end", ["\r\n", " \n", "\n\n"])
def test_ends_of_lines_are_no_words(end):
    """git and editors change them by themselves."""
    assert is_ours(written().replace("\n", end))


@pytest.mark.parametrize(
    "edit",
    [
        lambda card: card + "\nAsk me before you use it.\n",
        lambda card: card.replace("## Limits", "## Warnings"),
        lambda card: card.replace("library_name: transformers", "library_name: transformers\nlicense: mit"),
        lambda card: card.replace("## Limits", ""),
        lambda card: card.partition("<!--")[0],
        lambda card: card.replace("Written by optimum_prune", "Written by me"),
    ],
)
def test_edited(edit):
    card = edit(written())
    assert card != written() and not is_ours(card)


@pytest.mark.parametrize(
    "text", ["", "# Mine", "pruned with `optimum_prune`", f"<!-- Written by optimum_prune ({'0' * 32})."]
)
def test_words_of_others(text):
    assert not is_ours(text)


def test_signed_again():
    card = ModelCard(written())
    card.data["license"] = "mit"
    assert not is_ours(str(card))
    for _ in range(2):
        sign_(card)
        assert is_ours(str(card)) and str(card).count("<!--") == 1


def test_spare_names():
    files = {}
    for content in (b"a", b"b", b"a", b"c"):
        if name := spare_name(content, files.get):
            files[name] = content
    assert files == {
        "README.before-pruning.md": b"a",
        "README.before-pruning-2.md": b"b",
        "README.before-pruning-3.md": b"c",
    }
