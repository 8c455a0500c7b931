"""Trained checkpoints on disk, whole or absent, each trained when it is first asked for."""

import hashlib
import json
import shutil
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from tests.lab import text
from tests.lab.recipes import RECIPES, recipe
from tests.lab.train import train

LAB = Path(__file__).parent
ROOT = LAB.parents[1] / ".lab"
FIGURES = "training.json"


def folder(name: str) -> Path:
    """Return the folder of a trained checkpoint and its tokenizer or processor; train it first where there is none.

    Processes that ask at once wait for the first of them.
    """
    recipe(name)  # before anything is written
    place = ROOT / _key()
    target = place / name
    if target.exists():
        return target
    place.mkdir(parents=True, exist_ok=True)
    with FileLock(place / f"{name}.lock"):
        if not target.exists():
            part = place / f"{name}.part"
            shutil.rmtree(part, ignore_errors=True)  # of a training that was killed
            _write(name, part)
            part.rename(target)
    return target


def figures(name: str) -> dict[str, float]:
    """Return what was measured when the model was trained."""
    return json.loads((folder(name) / FIGURES).read_text(encoding="utf-8"))


def _write(name: str, target: Path) -> None:
    model, processor, measured = train(RECIPES[name], name)
    model.save_pretrained(target)
    processor.save_pretrained(target)
    (target / FIGURES).write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")


def _key() -> str:
    """Hash what decides on the weights: the lab's source, the libraries, and the texts, which come with Python."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(LAB.glob("[!_]*.py")) if "test_" not in path.name]
    libraries = [version(package) for package in ("torch", "transformers", "tokenizers", "pillow")]
    content = [*sources, *libraries, *text.training(), *text.evaluation()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
