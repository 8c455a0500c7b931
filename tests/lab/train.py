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
WEIGHT_DECAY = 0.1
ADAM_LEARNING_RATE = 8e-3


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
        torch.set_num_threads(1)  # two models at once on two cores are faster than one on both
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _fit_(model: nn.Module, task: Task, recipe: Recipe, name: str) -> None:
    optimizers = _optimizers(model, recipe)
    peaks = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(SEED)
    model.train()
    with tqdm(range(recipe.steps), desc=f"Training {name}", unit="step") as bar:
        for step in bar:
            done = step / recipe.steps
            for group, peak in peaks:
                group["lr"] = peak * _schedule(done)
            loss = model(**task.batch(generator, done)).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
    model.eval()


def _schedule(done: float) -> float:
    """Return the fraction of the learning rate: a tenth of the training to warm up, then a cosine down to zero."""
    return min(10 * done + 0.01, (1 + math.cos(math.pi * done)) / 2)


def _optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for embeddings, head, norms and biases.

    Muon reaches the same held-out loss as AdamW alone in about a quarter of the time.
    """
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        in_blocks = parameter.dim() == 2 and parameter not in tables and not name.startswith("lm_head")
        (matrices if in_blocks else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=recipe.learning_rate, weight_decay=WEIGHT_DECAY, momentum=0.9),
        torch.optim.AdamW(others, lr=ADAM_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
