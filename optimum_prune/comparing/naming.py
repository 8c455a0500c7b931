"""Settings by name: given ones, or names made from what differs."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from optimum_prune import checks
from optimum_prune.config import PruningConfig
from optimum_prune.errors import InvalidConfig, PruningError

DENSE = "dense"
"""Name of the model as it came in."""
SELECTION = ("selection", "candidates")
"""Fields of `CalibrationConfig` in which settings may differ, though all share one draw."""


def named(settings: Sequence[PruningConfig] | Mapping[str, PruningConfig]) -> list[tuple[str, PruningConfig]]:
    """Return `(name, config)` of every setting.

    Args:
        settings: by name; or a sequence, whose names are made: those that differ in nothing but one number, the
            sparsity, share a name.

    Raises:
        InvalidConfig: there are none, or one is no PruningConfig.
    """
    given = isinstance(settings, Mapping)
    if not isinstance(settings, Sequence | Mapping) or not settings:
        raise InvalidConfig("settings must be PruningConfigs, at least one: a sequence, or a mapping of names to them.")
    for name, config in settings.items() if given else enumerate(settings):
        if not isinstance(config, PruningConfig):
            raise InvalidConfig(f"Setting {name!r} must be a PruningConfig, got a {type(config).__name__}.")
        if given and (not isinstance(name, str) or not name.strip() or not name.isprintable() or name == DENSE):
            raise InvalidConfig(
                f"The name of a setting must be one line of text that is not empty, and not {DENSE!r}, got {name!r}."
            )
    if given:
        return list(settings.items())
    facts = [_facts(config) for config in settings]
    differing = [name for name in {n: None for f in facts for n in f} if len({f.get(name) for f in facts}) > 1]
    names = [_name(config, fact, differing) for config, fact in zip(settings, facts, strict=True)]
    return list(zip(names, settings, strict=True))


def at(
    settings: Sequence[tuple[str, PruningConfig]], sparsities: Sequence[float] | None
) -> list[tuple[str, PruningConfig]]:
    """Return every setting at every sparsity; where none are given, at its own.

    Raises:
        InvalidConfig: a setting cannot be at such a sparsity, or two settings are the same.
    """
    if sparsities is not None and (not isinstance(sparsities, list | tuple) or not sparsities):
        raise checks.refuse("sparsities", "None or a list of fractions, at least one", sparsities)
    found: list[tuple[str, PruningConfig]] = []
    for name, config in settings:
        for sparsity in [config.sparsity] if sparsities is None else sparsities:
            with_sparsity = within(name, replace, config, sparsity=sparsity)
            if twin := next((other for other, known in found if known == with_sparsity), None):
                at_it = "" if with_sparsity.sparsity is None else f" at a sparsity of {with_sparsity.sparsity}"
                raise InvalidConfig(f"Settings {twin!r} and {name!r} are the same{at_it}. Leave one of them out.")
            found.append((name, with_sparsity))
    return found


def within(name: str, do: Any, *arguments: Any, **options: Any) -> Any:
    """Call `do`; a refusal says of which setting it is."""
    try:
        return do(*arguments, **options)
    except PruningError as error:
        raise type(error)(f"Setting {name!r}: {error}") from error


def _facts(config: PruningConfig) -> dict[str, str]:
    """Return what a setting says of itself and the defaults do not, in words, by name of the field or option."""
    facts = {"scorer": config.scorer}
    values = [(option.name, getattr(config, option.name), option.default) for option in fields(config)]
    chosen = [option for option in fields(config.calibration) if option.name in SELECTION]
    values += [(option.name, getattr(config.calibration, option.name), option.default) for option in chosen]
    for name, value, default in values:
        if name == "scorer_options":
            facts |= {option: f"{option}={_word(given)}" for option, given in (value or {}).items()}
        elif name == "pattern" and value != default:
            facts[name] = value
        elif name == "sparsity" and not isinstance(value, dict):
            continue
        elif name == "induction":
            facts |= _induction(config)
        elif name not in ("pattern", "scorer", "calibration") and value != default:
            facts[name] = f"{name}={_word(value)}"
    return facts


def _induction(config: PruningConfig) -> dict[str, str]:
    """Return what a setting says of learned masks; scorer "si" has them without saying so."""
    if config.induction is None:
        return {}
    values = {option.name: getattr(config.induction, option.name) for option in fields(config.induction)}
    changed = {o.name: values[o.name] for o in fields(config.induction) if values[o.name] != o.default}
    if changed:
        return {"induction": f"induction={_word(changed)}"}
    return {} if config.scorer == "si" else {"induction": "induction"}


def _name(config: PruningConfig, facts: Mapping[str, str], differing: Sequence[str]) -> str:
    return " ".join([config.scorer, *(facts[name] for name in differing if name in facts and name != "scorer")])


def _word(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, Mapping):
        return "+".join(f"{name}:{_word(part)}" for name, part in value.items())
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
