"""Modes that are given back on every way out, the way in included; no tensor that follows torch's defaults."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import optimum_prune
from optimum_prune.modes import evaluating, frozen, plain_defaults
from tests.defaults import other_defaults

PACKAGE = Path(optimum_prune.__file__).parent


class Interrupted(nn.Module):
    """Changes its mode, and is interrupted at that."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.linear.bias.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        raise KeyboardInterrupt

    def requires_grad_(self, requires_grad=True):
        super().requires_grad_(requires_grad)
        raise KeyboardInterrupt


def facts(model):
    return [module.training for module in model.modules()], [p.requires_grad for p in model.parameters()]


@pytest.mark.parametrize("mode", [evaluating, frozen])
def test_interrupted_on_the_way_in(mode):
    model = Interrupted()
    before = facts(model)
    with pytest.raises(KeyboardInterrupt), mode(model):
        pass
    assert facts(model) == before == ([True, True], [True, False])


def test_interrupted_while_gradients_are_turned_off(monkeypatch):
    monkeypatch.setattr(Interrupted, "train", nn.Module.train)
    test_interrupted_on_the_way_in(frozen)


@pytest.mark.parametrize("mode", [evaluating, frozen])
def test_modes_inside_and_after(mode):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout().eval())
    model[0].bias.requires_grad_(False)
    before = facts(model)
    with mode(model):
        assert facts(model) == ([False] * 3, [mode is evaluating, False])
    assert facts(model) == before


MAKERS = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"}
MAKERS |= {"tensor", "zeros"}
FLOATS = {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}
"""Of these, the ones whose dtype does not follow from the values given."""


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_tensor_is_made_with_device_and_dtype(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in MAKERS}:
            named = {keyword.arg for keyword in node.keywords}
            stand_in = any(ast.unparse(keyword.value) == "'meta'" for keyword in node.keywords)  # nothing is computed
            makes_floats = ast.unparse(node.func)[len("torch.") :] in FLOATS and not stand_in
            wanted = {"device", "dtype"} if makes_floats else {"device"}
            assert wanted <= named, f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def test_plain_defaults_are_given_back():
    with other_defaults(torch.float64):
        with pytest.raises(KeyboardInterrupt), plain_defaults():
            made = torch.ones(2)
            raise KeyboardInterrupt
        after = torch.ones(2)
    assert (made.dtype, made.device.type) == (torch.float32, "cpu")
    assert (after.dtype, after.device.type) == (torch.float64, "meta")
