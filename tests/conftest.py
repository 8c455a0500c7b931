"""What holds for every test."""

import pytest
import torch

from tests.models import llama
from tests.words import tokenizer

# Bit-for-bit comparisons need one order of summation, and on small tensors one thread is faster than two that spin.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Return the folder of a small Llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "dense"
    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
