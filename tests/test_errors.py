"""The closed set of errors, and how a wrong name is worded."""

import pytest

from optimum_prune import errors
from optimum_prune.errors import unknown

BUILT_IN = {
    "InvalidConfig": ValueError,
    "UnsupportedArchitecture": ValueError,
    "UnsupportedModel": RuntimeError,
    "CalibrationError": ValueError,
    "CheckpointError": RuntimeError,
}


def test_the_set_is_closed():
    kinds = {error.__name__ for error in errors.PruningError.__subclasses__()}
    assert kinds == set(BUILT_IN)


@pytest.mark.parametrize("name", BUILT_IN)
def test_caught_as_ours_and_as_the_built_in_one(name):
    error = getattr(errors, name)
    assert issubclass(error, errors.PruningError) and issubclass(error, BUILT_IN[name])


@pytest.mark.parametrize(
    ("given", "allowed", "message"),
    [
        (
            "wandaa",
            ["ntk", "wanda"],
            "Unknown scorer 'wandaa'; supported: 'ntk', 'wanda'. Did you mean 'wanda'?",
        ),
        ("NTK", ["ntk", "wanda"], "Unknown scorer 'NTK'; supported: 'ntk', 'wanda'. Did you mean 'ntk'?"),
        ("taylor", ["ntk", "wanda"], "Unknown scorer 'taylor'; supported: 'ntk', 'wanda'."),
        (7, ["ntk"], "Unknown scorer 7; supported: 'ntk'."),
        (None, iter(["ntk"]), "Unknown scorer None; supported: 'ntk'."),
        ("ntk", [], "Unknown scorer 'ntk'; supported: none."),
    ],
)
def test_wrong_name(given, allowed, message):
    assert unknown("scorer", given, allowed) == message
