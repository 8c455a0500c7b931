"""What the configurations share: checked fields, and the ways to and from dicts and recipes."""

import json
import os
import reprlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import Field, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from optimum_prune import checks
from optimum_prune.errors import InvalidConfig, unknown

if TYPE_CHECKING:
    from typing_extensions import Self

VERSION = 1


def option(default: Any, check: checks.Check, help: str) -> Any:
    """Declare a field: default, check, line of help. One that defaults to None also accepts None."""
    metadata = {"help": help, "check": check, "optional": default is None}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


class Config:
    """What both configurations share: checked fields, and the ways to and from dicts and files."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __new__(cls, *_args: Any, **given: Any) -> "Self":
        """Refuse a misspelt field by name, where a dataclass would raise a bare TypeError."""
        cls._check_names(given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for declared in fields(self):
            value = getattr(self, declared.name)
            if not (value is None and declared.metadata["optional"]):
                object.__setattr__(self, declared.name, declared.metadata["check"](declared.name, value))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.to_dict().items() if name != "version")
        return f"{type(self).__name__}({shown})"

    @classmethod
    def _check_names(cls, given: Iterable[object]) -> None:
        names = [declared.name for declared in fields(cls)]
        for name in given:
            if name not in names:
                raise InvalidConfig(unknown(f"{cls.__name__} field", name, names))

    @classmethod
    def check_type(cls, config: object) -> None:
        """Refuse what is no such config; a mapping of its fields is none."""
        if not isinstance(config, cls):
            raise InvalidConfig(f"config must be a {cls.__name__}, got a {type(config).__name__}.")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; data held in memory is described, never copied."""
        return {"version": VERSION} | {declared.name: getattr(self, declared.name) for declared in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Self":
        """Build from what `to_dict` returned, or from a recipe written by hand.

        Fields that this version does not know are ignored, with a warning, where a newer version wrote them.

        Raises:
            InvalidConfig: any other unknown field, or a value that is not allowed.
        """
        if not isinstance(data, Mapping):
            raise checks.refuse(cls.__name__, "a mapping of fields", data)
        values = dict(data)
        if checks.integer(1)("version", values.pop("version", VERSION)) > VERSION:
            known = {declared.name for declared in fields(cls)}
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
        text = _yaml().safe_dump(self.to_dict(), sort_keys=False)  # its allow_unicode would lose line breaks
        Path(path).write_text(text, encoding="utf-8")

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON recipe."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "Self":
        """Read a recipe; the suffix says whether it is YAML or JSON."""
        return cls.from_dict(read_recipe(path))

    from_yaml = from_json = from_file


def part(config: type[Config]) -> checks.Check:
    """Accept a config of that type, or a mapping of its fields."""

    def check(name: str, value: Any) -> Any:
        if isinstance(value, config):
            return value
        if isinstance(value, Mapping):
            return config.from_dict(value)
        raise checks.refuse(name, f"a {config.__name__} or a mapping", value)

    return check


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
        data = json.loads(text, object_pairs_hook=_unique) if path.suffix == ".json" else _read_yaml(text)
    except OSError as error:
        raise InvalidConfig(f"Recipe {str(path)!r} cannot be read: {error.strerror}.") from error
    except (ValueError, _yaml().YAMLError) as error:  # both of json's and unicode's errors are ValueErrors
        raise InvalidConfig(f"Recipe {str(path)!r} is not valid {path.suffix[1:]}: {error}") from error
    if not isinstance(data, dict):
        raise InvalidConfig(f"Recipe {str(path)!r} must hold a mapping of fields, got {reprlib.repr(data)}.")
    return data


def _unique(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Make a mapping; a field that is there twice would silently be the last one."""
    mapping: dict[Any, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"{key!r} is there twice.")
        mapping[key] = value
    return mapping


def _read_yaml(text: str) -> Any:
    class Loader(_yaml().SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _unique((key.value, None) for key, _ in node.value if isinstance(key.value, str))
            return super().construct_mapping(node, deep)

    return _yaml().load(text, Loader)


def _yaml() -> Any:
    import yaml  # here, because this module is imported to print help

    return yaml
