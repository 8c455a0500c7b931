"""Cards of example checkpoints: `python -m tests.model_cards SAVED NAME` copies what a card is made of, and makes it.

Beside each card in `model_cards/` lie the report that it was written from and its pictures; the tests write it again.
"""

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open

from optimum_prune.integrations.card import model_card
from optimum_prune.integrations.hub import published
from optimum_prune.integrations.layouts import PICTURES
from optimum_prune.integrations.loading import REPORT
from optimum_prune.integrations.metadata import inherited_metadata
from optimum_prune.measurements import Evaluation
from optimum_prune.recovery.adapter import FOLDER, is_adapter
from optimum_prune.report import PruningReport

CARDS = Path(__file__).parents[1] / "model_cards"
FACTS = "card.json"
"""What a card says beside its report: how the weights were written."""


def copy(saved: Path, folder: Path) -> None:
    """Copy what the card of a saved checkpoint is made of, without paths of this machine, and write the card."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    report = published(json.loads((saved / REPORT).read_text(encoding="utf-8")))
    (folder / REPORT).write_text(json.dumps(report) + "\n", encoding="utf-8")
    if (saved / PICTURES).exists():
        shutil.copytree(saved / PICTURES, folder / PICTURES)
    (folder / FACTS).write_text(json.dumps(_facts(saved), indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card(folder), encoding="utf-8")


def card(folder: Path) -> str:
    """Write the card of a folder in `model_cards/` again."""
    data = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    evaluations = {name: Evaluation.from_dict(values) for name, values in data["evaluations"].items()}
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    pictures = [f"{PICTURES}/{path.name}" for path in sorted((folder / PICTURES).glob("*.png"))]
    return f"{model_card(PruningReport.from_dict(data), evaluations=evaluations, pictures=pictures, **facts)}"


def _facts(saved: Path) -> dict[str, Any]:
    config = json.loads((saved / "config.json").read_text(encoding="utf-8"))
    files = sorted(saved.glob("*.safetensors"))
    return {
        "layout": config["pruning_config"]["layout"],
        "storage": config.get("quantization_config", {}).get("storage", "dense"),
        "architecture": config["architectures"][0],
        "reads_images": (saved / "processor_config.json").exists(),
        "file_bytes": sum(file.stat().st_size for file in files),
        "parameters": sum(_numbers(file) for file in files),
        "adapter": is_adapter(saved / FOLDER),
        "card_data": _metadata(saved),
    }


def _metadata(saved: Path) -> dict[str, Any]:
    """Read off the saved card what no report knows."""
    from huggingface_hub import ModelCard

    data = ModelCard.load(saved / "README.md").data
    base = {"base_model": data.get("base_model")} if data.get("base_model") else {}
    return base | {name: value for name, value in inherited_metadata(saved).items() if name != "datasets"}


def _numbers(file: Path) -> int:
    with safe_open(file, "pt") as opened:
        return sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118


if __name__ == "__main__":
    copy(Path(sys.argv[1]), CARDS / sys.argv[2])
