"""Checkpoints that bring Python code of their own."""

import json
from pathlib import Path
from typing import Any

from tests.models import llama
from tests.words import tokenizer

TOKENIZER = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    version = 1
"""
MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    pass

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
    version = 1
"""
PROCESSOR = """
from transformers import ProcessorMixin

class OwnProcessor(ProcessorMixin):
    def __init__(self, tokenizer=None):
        super().__init__(tokenizer)
"""
MODEL_MAP = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


def rewrite(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def with_own_tokenizer(folder: Path) -> Path:
    """Write a Llama whose tokenizer is code of its own."""
    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "tokenization_own.py").write_text(TOKENIZER)
    auto_map = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    rewrite(folder / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="OwnTokenizer")
    return folder


def with_own_model(folder: Path) -> Path:
    """Write a Llama whose config and model are code of their own."""
    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "modeling_own.py").write_text(MODEL)
    rewrite(folder / "config.json", auto_map=MODEL_MAP)
    return folder
