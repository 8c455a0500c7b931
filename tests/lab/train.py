"""Training: from a recipe to a model, the same one each time."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.utils.logging import tqdm

from tests.lab.recipes import Recipe, Task

SEED = 0
THREADS = 2
WEIGHT_DECAY = 0.3  # the texts are seen ten times


def train(recipe: Recipe, name: str) -> tuple[Any, Any, dict[str, float]]:
    """Train a model. The global random state and the number of threads are left as they were.

    Args:
        recipe: what to train.
        name: shown beside the progress bar.

    Returns:
        The model in evaluation mode, its tokenizer or processor, and what was measured.
    """
    started = time.monotonic()
    with _seeded():
        task = recipe.task()
        model: Any = recipe.build(getattr(task.processor, "tokenizer", task.processor))
        _fit_(model, task, recipe, name)
        figures = {
            "parameters": model.num_parameters(),
            "seconds": time.monotonic() - started,
            **task.measure(model),
        }
    return model, task.processor, figures


@contextmanager
def _seeded() -> Iterator[None]:
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        torch.set_num_threads(THREADS)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _fit_(model: nn.Module, task: Task, recipe: Recipe, name: str) -> None:
    optimizer = torch.optim.AdamW(_groups(model), lr=recipe.learning_rate, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(SEED)
    model.train()
    with tqdm(range(recipe.steps), desc=f"Training {name}", unit="step") as bar:
        for step in bar:
            done = step / recipe.steps
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * _schedule(done)
            loss = model(**task.batch(generator, done)).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
    model.eval()


def _schedule(done: float) -> float:
    """Return the fraction of the learning rate: a tenth of the training to warm up, then a cosine down to zero."""
    return min(10 * done + 0.01, (1 + math.cos(math.pi * done)) / 2)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Only matrices decay: biases and norms have nothing to gain from it."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
