"""Models whose configs load, and cannot be written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.models import llama, opt, t5
from tests.words import tokenizer


def on_disk(folder: Path, model: PreTrainedModel | None = None, **changes: Any) -> Path:
    """Save a model and its tokenizer, then change `config.json`; by default so that saving it is refused."""
    (model or llama()).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    # The class takes it when loading, and validates it when saving: attention by "sdpa" returns no weights.
    (folder / "config.json").write_text(json.dumps(config | (changes or {"output_attentions": True})))
    return folder


def _loaded(build: Callable[[], PreTrainedModel]) -> Callable[[Path], PreTrainedModel]:
    def load(folder: Path) -> PreTrainedModel:
        model = build()
        return type(model).from_pretrained(on_disk(folder, model))

    return load


def _generation(folder: Path) -> PreTrainedModel:
    model = llama()
    model.generation_config.temperature = 0.5  # pyright: ignore[reportOptionalMemberAccess] - without do_sample
    return model


class OwnConfig(LlamaConfig):
    """Llama's config, with an opinion about widths when it is written."""

    def validate(self) -> None:
        """Refuse narrow MLPs."""
        if self.__dict__["intermediate_size"] < 48:
            raise AssertionError("no fewer than 48 channels")


class OwnForCausalLM(LlamaForCausalLM):
    """Llama with a config of its own."""

    config_class = OwnConfig


def _own(folder: Path) -> PreTrainedModel:
    return OwnForCausalLM(OwnConfig(**llama().config.to_dict())).eval()


REFUSED: dict[str, tuple[Callable[[Path], PreTrainedModel], str]] = {
    "llama": (_loaded(llama), r"config \(.*output_attentions.*Change config\.json"),
    "t5": (_loaded(t5), r"config \(.*output_attentions.*Change config\.json"),
    "opt": (_loaded(opt), r"config \(.*output_attentions.*Change config\.json"),
    "generation": (_generation, r"generation_config \(.*temperature.*Change generation_config\.json"),
    "own code": (_own, r"OwnForCausalLM .*config \(AssertionError: no fewer than 48 channels\)"),
}
"""Name -> what builds the model in an empty folder, and what is said of it."""


def load_refused(folder: Path) -> Any:
    """Load the one on disk as transformers does."""
    return AutoModelForCausalLM.from_pretrained(folder)
