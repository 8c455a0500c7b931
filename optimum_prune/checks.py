"""Checks of single values: each returns the value to keep, or raises InvalidConfig with what is allowed."""

import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from optimum_prune.errors import InvalidConfig, unknown

PATTERNS = ("structured", "layers", "unstructured", "n:m")

Check = Callable[[str, Any], Any]
"""`(name of the field, value given) -> value kept`."""


def refuse(name: str, expected: str, value: object) -> InvalidConfig:
    """Word a refusal, with the value cut to a readable length."""
    return InvalidConfig(f"{name} must be {expected}, got {reprlib.repr(value)}.")


def integer(minimum: int, below: int = 2**63) -> Check:
    """Accept integers from `minimum` on, and below what torch takes as seeds and sizes. A bool is none."""
    expected = f"an integer >= {minimum}" + (f" and < {below}" if below < 2**63 else "")

    def check(name: str, value: Any) -> int:
        if not _is_integer(value) or not minimum <= int(value) < below:
            raise refuse(name, expected, value)
        return int(value)

    return check


def sparsity(name: str, value: Any) -> float | dict[str, float]:
    """Accept a fraction removed, 0 <= s < 1, or a mapping of module patterns to such fractions."""
    if isinstance(value, Mapping):
        if not value or not all(isinstance(pattern, str) and pattern for pattern in value):
            raise refuse(name, "a fraction, or a non-empty mapping of module patterns to fractions", value)
        return {pattern: _fraction(f"{name}[{pattern!r}]", share) for pattern, share in value.items()}
    return _fraction(name, value)


def _fraction(name: str, value: Any) -> float:
    if not 0 <= _number(value) < 1:
        raise refuse(name, "in [0, 1)", value)
    return float(value)


def options(name: str, value: Any) -> dict[str, Any]:
    """Accept a mapping of names to values that JSON can hold; what they mean is the scorer's to say."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key for key in value):
        raise refuse(name, "a mapping of names to values", value)
    try:
        return json.loads(json.dumps(dict(value)))
    except (TypeError, ValueError) as error:
        raise refuse(name, "a mapping of names to values that JSON can hold", value) from error


def gamma(name: str, value: Any) -> float | str:
    """Accept `"auto"` or a positive number."""
    if isinstance(value, str) and value == "auto":
        return value
    if not 0 < _number(value) < math.inf:
        raise refuse(name, "'auto' or a finite number > 0", value)
    return float(value)


def number(above: float, below: float = math.inf, *, or_equal: bool = False) -> Check:
    """Accept numbers between two bounds, both left out; `or_equal` takes in the lower one."""
    low = f"{'>=' if or_equal else '>'} {above:g}"
    expected = f"a number {low} and < {below:g}" if below < math.inf else f"a finite number {low}"

    def check(name: str, value: Any) -> float:
        given = _number(value)
        if not (above < given < below or (or_equal and given == above)):
            raise refuse(name, expected, value)
        return given

    return check


def boolean(name: str, value: Any) -> bool:
    """Accept True and False, not what only counts as such."""
    if not isinstance(value, bool):
        raise refuse(name, "True or False", value)
    return value


def text(name: str, value: Any) -> str:
    """Accept a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise refuse(name, "a non-empty string", value)
    return value


def one_of(kind: str, names: Callable[[], Iterable[str]]) -> Check:
    """Accept one of the names; they are asked for when a value is checked."""

    def check(name: str, value: Any) -> str:
        allowed = list(names())
        if not isinstance(value, str) or value not in allowed:  # an array would compare its elements
            raise InvalidConfig(unknown(kind, value, allowed))
        return value

    return check


def list_of(what: str, each: Check) -> Check:
    """Accept a list without repetitions, of values that `each` accepts; one string is a list of one."""

    def check(name: str, value: Any) -> list[str]:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list | tuple) or not values or not all(isinstance(v, str) and v for v in values):
            raise refuse(name, f"None or a non-empty list of {what}", value)
        if len(set(values)) < len(values):
            raise refuse(name, "free of repetitions", value)
        return [each(name, v) for v in values]

    return check


def pattern(name: str, value: Any) -> str:
    """Accept the patterns of this version and of later ones; which are available is the config's to say."""
    if not isinstance(value, str):
        # YAML 1.1 reads an unquoted 2:4 as the sexagesimal number 124
        raise refuse(name, 'a string (in YAML, quote it: "2:4")', value)
    if n_of_m := re.fullmatch(r"(\d+):(\d+)", value):
        n, m = map(int, n_of_m.groups())
        if not 0 < n < m:
            raise InvalidConfig(
                f"pattern {value!r} is no n:m: n of every m consecutive weights are removed, so 0 < n < m."
            )
    elif value == "n:m" or value not in PATTERNS:
        raise InvalidConfig(unknown("pattern", value, PATTERNS))
    return value


def source(name: str, value: Any) -> Any:
    """Accept a name, a path, a list of texts or of token ids, or whatever has columns as a dataset does."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple) and value:
        if all(isinstance(item, str) for item in value) or all(map(_is_token_ids, value)):
            return list(value)
        raise InvalidConfig(f"{name} must hold only strings, or only lists of token ids; it mixes or holds others.")
    if isinstance(value, Mapping) and value:  # a DatasetDict
        raise InvalidConfig(f"{name} must be one dataset; choose one of {sorted(map(str, value))}.")
    if hasattr(value, "column_names") and not isinstance(value, Mapping):
        return value
    raise refuse(
        name,
        "a dataset id, a file or folder, a non-empty list of strings or of token-id lists, a "
        "datasets.Dataset or 'self'",
        value,
    )


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_token_ids(item: object) -> bool:
    return isinstance(item, list | tuple) and all(map(_is_integer, item))


def _number(value: object) -> float:
    """Return nan for whatever is no number, or too large for a float, so that one comparison refuses them all."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan
