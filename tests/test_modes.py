"""Modes that are given back on every way out, the way in included."""

import pytest
from torch import nn

from optimum_prune.modes import evaluating, frozen


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
