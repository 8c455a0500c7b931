"""What to prune, how, and on which data: checked, versioned, the same in Python, recipes and on the command line."""

import hashlib
import json
import math
import os
import re
import reprlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import registry
from .errors import InvalidConfig, unknown

if TYPE_CHECKING:
    from typing_extensions import Self

VERSION = 1
PATTERNS = ("structured",)
ALLOCATIONS = ("auto", "uniform", "global", "gamma")
UNITS = ("kv_group", "mlp_channel")
IN_MEMORY = "in-memory: "  # how a written config begins the description of data that it does not hold

Check = Callable[[str, Any], Any]  # (field's name, value given) -> value kept, or InvalidConfig


def _refuse(name: str, expected: str, value: object) -> InvalidConfig:
    return InvalidConfig(f"{name} must be {expected}, got {reprlib.repr(value)}.")


def _integer(minimum: int) -> Check:
    def check(name: str, value: Any) -> int:
        # 2**63 is where the seeds and sizes of torch end
        if isinstance(value, bool) or not isinstance(value, Integral) or not minimum <= value < 2**63:
            raise _refuse(name, f"an integer >= {minimum}", value)
        return int(value)

    return check


def _number(value: object) -> float:
    """Return nan for whatever is no number, so that one comparison refuses both."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan


def _sparsity(name: str, value: Any) -> float:
    if not 0 <= _number(value) < 1:
        raise _refuse(name, "in [0, 1)", value)
    return float(value)


def _gamma(name: str, value: Any) -> float | str:
    if isinstance(value, str) and value == "auto":
        return value
    if not 0 < _number(value) < math.inf:
        raise _refuse(name, "'auto' or a finite number > 0", value)
    return float(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _refuse(name, "a non-empty string", value)
    return value


def _one_of(word: str, names: Callable[[], Iterable[str]]) -> Check:
    def check(name: str, value: Any) -> str:
        if value not in (allowed := list(names())):
            raise InvalidConfig(unknown(word, value, allowed))
        return value

    return check


def _list_of(what: str, each: Check) -> Check:
    def check(name: str, value: Any) -> list[str]:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list | tuple) or not values or not all(isinstance(v, str) and v for v in values):
            raise _refuse(name, f"None or a non-empty list of {what}", value)
        if len(set(values)) < len(values):
            raise _refuse(name, "free of repetitions", value)
        return [each(name, v) for v in values]

    return check


def _pattern(name: str, value: Any) -> str:
    if not isinstance(value, str):
        # YAML 1.1 reads an unquoted 2:4 as the sexagesimal number 124
        raise _refuse(name, 'a string (in YAML, quote it: "2:4")', value)
    if value in PATTERNS:
        return value
    if n_of_m := re.fullmatch(r"(\d+):(\d+)", value):
        n, m = map(int, n_of_m.groups())
        if not 0 < n < m:
            raise InvalidConfig(
                f"pattern {value!r} is no n:m: n of every m consecutive weights are removed, so 0 < n < m."
            )
    elif value not in ("unstructured", "layers"):
        raise InvalidConfig(unknown("pattern", value, PATTERNS))
    return value


def _source(name: str, value: Any) -> Any:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple) and value:
        if all(isinstance(item, str) for item in value) or all(map(_is_token_ids, value)):
            return list(value)
        raise InvalidConfig(f"{name} must hold only strings, or only lists of token ids; it mixes or holds others.")
    if hasattr(value, "column_names") and not isinstance(value, Mapping):
        return value
    if isinstance(value, Mapping):
        raise InvalidConfig(f"{name} must be one dataset; choose one of {sorted(map(str, value))}.")
    raise _refuse(
        name,
        "a dataset id, a file or folder, a non-empty list of strings or of token-id lists, a datasets.Dataset or 'self'",
        value,
    )


def _is_token_ids(item: object) -> bool:
    return isinstance(item, list | tuple) and all(isinstance(i, Integral) and not isinstance(i, bool) for i in item)


def _calibration(name: str, value: Any) -> "CalibrationConfig":
    if isinstance(value, CalibrationConfig):
        return value
    if isinstance(value, Mapping):
        return CalibrationConfig.from_dict(value)
    raise _refuse(name, "a CalibrationConfig or a mapping", value)


def _describe(source: Any) -> str:
    """Name a calibration source, without its data when it lives in memory."""
    if isinstance(source, str):
        return source
    if isinstance(source, list):
        kind = "texts" if isinstance(source[0], str) else "token lists"
        digest = hashlib.sha256(json.dumps(source, default=int).encode()).hexdigest()
        return f"{IN_MEMORY}{len(source)} {kind}, sha256 {digest[:16]}"
    return f"{IN_MEMORY}{type(source).__name__} with columns {', '.join(source.column_names)}"


def _option(default: Any, check: Check, help: str) -> Any:
    """Declare a field: its default, its check and its line of help. One that defaults to None also accepts None."""
    metadata = {"help": help, "check": check, "optional": default is None}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def read_recipe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a YAML or JSON file, chosen by its suffix, without checking what it says.

    Raises:
        InvalidConfig: the file cannot be read, is no YAML or JSON, or holds no mapping.
    """
    path = Path(path)
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise InvalidConfig(f"A recipe must end in .yaml, .yml or .json, got {path.name!r}.")
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else _yaml().safe_load(text)
    except OSError as error:
        raise InvalidConfig(f"Recipe {str(path)!r} cannot be read: {error.strerror}.") from error
    except (ValueError, _yaml().YAMLError) as error:  # both of json's and unicode's errors are ValueErrors
        raise InvalidConfig(f"Recipe {str(path)!r} is not valid {path.suffix[1:]}: {error}") from error
    if not isinstance(data, dict):
        raise InvalidConfig(f"Recipe {str(path)!r} must hold a mapping of fields, got {reprlib.repr(data)}.")
    return data


def _yaml() -> Any:
    import yaml  # here, because this module is imported to print help

    return yaml


class _Config:
    """What both configurations share: checked fields, and the ways to and from dicts and files."""

    def __new__(cls, *_args: Any, **given: Any) -> "Self":
        """Refuse a misspelt field by name, where a dataclass would raise a bare TypeError."""
        cls._check_names(given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for option in fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, option.name)
            if not (value is None and option.metadata["optional"]):
                object.__setattr__(self, option.name, option.metadata["check"](option.name, value))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.to_dict().items() if name != "version")
        return f"{type(self).__name__}({shown})"

    @classmethod
    def _check_names(cls, given: Iterable[object]) -> None:
        names = [option.name for option in fields(cls)]  # pyright: ignore[reportArgumentType]
        for name in given:
            if name not in names:
                raise InvalidConfig(unknown(f"{cls.__name__} field", name, names))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; data held in memory is described, never copied."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}  # pyright: ignore[reportArgumentType]
        return {"version": VERSION} | values

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Self":
        """Build from what `to_dict` returned, or from a recipe written by hand.

        Fields this version does not know are ignored with a warning when a newer version wrote them, else refused.
        """
        if not isinstance(data, Mapping):
            raise _refuse(cls.__name__, "a mapping of fields", data)
        values = dict(data)
        if _integer(1)("version", values.pop("version", VERSION)) > VERSION:
            known = {option.name for option in fields(cls)}  # pyright: ignore[reportArgumentType]
            if ignored := [name for name in values if name not in known]:
                warnings.warn(
                    f"This {cls.__name__} was written by a newer version of optimum_prune; "
                    f"fields unknown to this one are ignored: {', '.join(map(repr, ignored))}.",
                    stacklevel=2,
                )
            values = {name: value for name, value in values.items() if name in known}
        cls._check_names(values)
        return cls(**values)

    def to_yaml(self, path: str | os.PathLike[str]) -> None:
        """Write a YAML recipe."""
        text = _yaml().safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)
        Path(path).write_text(text, encoding="utf-8")

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON recipe."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "Self":
        """Read a recipe; the suffix says whether it is YAML or JSON."""
        return cls.from_dict(read_recipe(path))

    from_yaml = from_json = from_file


@dataclass(frozen=True, repr=False)
class CalibrationConfig(_Config):
    """Which texts the statistics are taken from, and how much of them."""

    source: Any = _option(
        "self",
        _source,
        "dataset id ('path' or 'path:name'), local file or folder, or 'self': text that the model itself generates; "
        "in Python also a list of strings, a list of token-id lists or a datasets.Dataset",
    )
    num_samples: int = _option(32, _integer(1), "number of token sequences")
    seq_len: int | None = _option(
        None, _integer(1), "tokens per sequence; by default what the scorer recommends, else min(2048, the model's limit)"
    )
    batch_size: int = _option(4, _integer(1), "sequences per forward pass; changes memory and time, not the result")
    seed: int = _option(0, _integer(0), "seed of the draw of sequences")
    split: str = _option("train", _text, "split of a dataset id")
    text_column: str | None = _option(
        None, _text, "column that holds the text; by default 'text', else the only column of strings"
    )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; data held in memory is described, never copied."""
        return super().to_dict() | {"source": _describe(self.source)}


@dataclass(frozen=True, repr=False)
class PruningConfig(_Config):
    """What is removed, by which score, and how it is spread over the layers."""

    quant_method = "optimum_prune"  # the word by which transformers finds the plugin

    pattern: str = _option("structured", _pattern, "what kind of thing is removed: 'structured', whole units")
    scorer: str = _option("ntk", _one_of("scorer", lambda: registry.available("scorers")), "how units are ranked, by name")
    sparsity: float | None = _option(None, _sparsity, "fraction of the targeted weights to remove, in [0, 1)")
    allocation: str = _option(
        "auto",
        _one_of("allocation", lambda: ALLOCATIONS),
        "how the removal is spread over the layers: 'uniform' (the same fraction in each), 'global' (one ranking per kind "
        "of unit), 'gamma' (global, MLP and attention coupled by gamma) or 'auto' (what the scorer recommends)",
    )
    gamma: float | Literal["auto"] = _option(
        "auto", _gamma, "how much larger a fraction MLPs lose than attention: a number > 0, or 'auto'"
    )
    units: list[str] | None = _option(
        None,
        _list_of("kinds of unit", _one_of("unit", lambda: UNITS)),
        "kinds of unit to remove: 'kv_group' (a key/value head with its query heads), 'mlp_channel'; by default all",
    )
    include: list[str] | None = _option(
        None, _list_of("glob patterns", _text), "glob patterns of the modules to prune, e.g. 'model.layers.1?.mlp'"
    )
    exclude: list[str] | None = _option(None, _list_of("glob patterns", _text), "glob patterns of the modules to leave")
    round_to: int = _option(8, _integer(1), "MLP channels kept are rounded up to a multiple of this")
    calibration: CalibrationConfig = _option(CalibrationConfig, _calibration, "data for scorers that need any")
    seed: int = _option(0, _integer(0), "seed of whatever is random in a scorer")

    def __post_init__(self) -> None:
        """Check every field, then those that constrain each other."""
        super().__post_init__()
        self._check_pattern()
        if self.gamma != "auto" and self.allocation not in ("auto", "gamma"):
            raise InvalidConfig(
                f"gamma={self.gamma} has no meaning with allocation={self.allocation!r}; use allocation='gamma'."
            )

    def _check_pattern(self) -> None:
        if ":" in self.pattern and self.sparsity is not None:
            n, m = map(int, self.pattern.split(":"))
            if not math.isclose(self.sparsity, n / m):
                raise InvalidConfig(
                    f"sparsity={self.sparsity} conflicts with pattern {self.pattern!r}, which removes exactly {n} of "
                    f"every {m} weights ({n / m:g}); leave sparsity out."
                )
        if self.pattern not in PATTERNS:
            supported = ", ".join(map(repr, PATTERNS))
            raise InvalidConfig(f"pattern {self.pattern!r} is not available in this version; available: {supported}.")
        if self.sparsity is None:
            raise InvalidConfig("sparsity is required: the fraction of the targeted weights to remove, in [0, 1).")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; data held in memory is described, never copied."""
        return super().to_dict() | {"calibration": self.calibration.to_dict()}
