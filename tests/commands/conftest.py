"""What the tests of the commands share."""

import logging
import warnings

import pytest
from optimum.commands import optimum_cli

from optimum_prune import Pruner


@pytest.fixture
def call_cli(monkeypatch, capfd):
    """Return a function that runs `optimum-cli prune` in this process -> (exit code, stdout, stderr)."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(warnings, "filters", list(warnings.filters))
    monkeypatch.setattr(logging.getLogger("transformers.integrations.heterogeneity"), "level", logging.NOTSET)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["optimum-cli", "prune", *map(str, arguments)])
        capfd.readouterr()
        code = 0
        try:
            optimum_cli.main()
        except SystemExit as exit:
            code = int(exit.code or 0)
        return (code, *capfd.readouterr())

    return call


@pytest.fixture
def loads_nothing(monkeypatch):
    """Fail where a model is loaded: what must be refused is refused before."""

    def from_pretrained(*arguments, **options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(Pruner, "from_pretrained", from_pretrained)
