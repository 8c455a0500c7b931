"""The closed set of errors, and the wording of a wrong name."""

import inspect

import pytest

from optimum_prune import errors
from optimum_prune.errors import PruningError, unknown

KINDS = {
    "InvalidConfig": ValueError,
    "UnsupportedArchitecture": ValueError,
    "UnsupportedModel": RuntimeError,
    "CalibrationError": ValueError,
    "CheckpointError": RuntimeError,
    "PublishError": RuntimeError,
}


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_ours_and_a_standard_one(name):
    kind = getattr(errors, name)
    assert issubclass(kind, PruningError)
    assert issubclass(kind, KINDS[name])


def test_the_set_is_closed():
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert {kind.__name__ for kind in classes if issubclass(kind, Exception)} == {"PruningError", *KINDS}


@pytest.mark.parametrize(
    ("given", "allowed", "message"),
    [
        (
            "wandaa",
            ["wanda", "si"],
            "Unknown scorer 'wandaa'; supported: 'wanda', 'si'. Did you mean 'wanda'?",
        ),
        ("NTK", ["ntk", "wanda"], "Unknown scorer 'NTK'; supported: 'ntk', 'wanda'. Did you mean 'ntk'?"),
        ("zzz", ["ntk", "wanda"], "Unknown scorer 'zzz'; supported: 'ntk', 'wanda'."),
        (7, ["ntk"], "Unknown scorer 7; supported: 'ntk'."),
        ("ntk", [], "Unknown scorer 'ntk'; supported: none."),
    ],
)
def test_unknown(given, allowed, message):
    assert unknown("scorer", given, allowed) == message


def test_unknown_reads_the_names_once():
    assert unknown("scorer", "ntkk", iter(["ntk"])).endswith("supported: 'ntk'. Did you mean 'ntk'?")
