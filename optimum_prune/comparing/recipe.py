"""A recipe of settings: what all of them share, and what differs."""

import os
from collections.abc import Mapping
from typing import Any

from optimum_prune.comparing.naming import within
from optimum_prune.config import PruningConfig
from optimum_prune.errors import InvalidConfig, unknown
from optimum_prune.options import read_recipe

Fields = Mapping[str, Any]


def read_settings(path: str | os.PathLike[str], given: Fields | None = None) -> dict[str, PruningConfig]:
    """Read a recipe: `base`, fields that all settings have, and `settings`, name -> fields that differ.

    Args:
        path: a YAML or JSON file.
        given: fields that override those of `base`, but not those of a setting.

    Raises:
        InvalidConfig: the file cannot be read, or a setting is not allowed; it is named.
    """
    recipe = read_recipe(path)
    for name in recipe:
        if name not in ("base", "settings"):
            raise InvalidConfig(unknown(f"field of {str(path)!r}", str(name), ["base", "settings"]))
    settings = _fields(recipe, "settings")
    if not settings:
        raise InvalidConfig(f"{str(path)!r} must hold settings: a mapping of names to the fields that differ.")
    base = _over(_fields(recipe, "base"), given or {})
    return {str(name): joined(str(name), base, _fields(settings, name)) for name in settings}


def joined(name: str, base: Fields, own: Fields) -> PruningConfig:
    """Make a setting of the fields that all have and its own, which win; a refusal names the setting."""
    return within(name, lambda: PruningConfig.from_dict(_over(base, own)))


def _over(base: Fields, own: Fields) -> Fields:
    """Let fields win over others; those of `calibration` one by one."""
    return {**base, **own, "calibration": {**_fields(base, "calibration"), **_fields(own, "calibration")}}


def _fields(mapping: Fields, name: Any) -> Fields:
    """Return fields of one name; none where nothing is written behind it."""
    fields = mapping.get(name)
    if fields is None:
        return {}
    if not isinstance(fields, Mapping):
        raise InvalidConfig(f"{name} must be a mapping of fields, got {fields!r}.")
    return fields
