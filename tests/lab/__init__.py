"""Small models that were really trained, one per architecture, with data to calibrate and to evaluate them.

`folder(name)` trains a model when it is first asked for, in about a minute on two cores, and keeps it in `.lab/`.
`python -m tests.lab` trains all of them.
"""

from typing import Any

from tests.lab.cache import figures, folder
from tests.lab.recipes import RECIPES, recipe

__all__ = ["NAMES", "calibration", "evaluation", "figures", "folder"]

NAMES = tuple(RECIPES)


def calibration(name: str) -> Any:
    """Return a source for `CalibrationConfig`: texts, or for LLaVA a dataset with `image` and `text`."""
    return recipe(name).task.calibration()


def evaluation(name: str) -> Any:
    """Return a source of the same kind, with nothing in it that the model was trained on."""
    return recipe(name).task.evaluation()
