"""What the commands share: flags, those that are fields of the configurations above all."""

import argparse
import typing
from collections.abc import Sequence
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

from optimum_prune import registry
from optimum_prune.config import CalibrationConfig, InductionConfig, PruningConfig
from optimum_prune.errors import InvalidConfig
from optimum_prune.measurements import check_evaluation
from optimum_prune.options import read_recipe
from optimum_prune.recovery.config import RecoveryConfig

CALIBRATION = "calibration_"  # prefix of the flags that are fields of CalibrationConfig
INDUCTION = "induction_"  # and of InductionConfig
RECOVERY_SECTION = "recovery"  # key of a recipe that holds the fields of RecoveryConfig
EVALUATION = "evaluate_"  # prefix of the flags that say the same of the evaluation data
LOADING = ("dtype", "device_map", "gguf_file", "trust_remote_code")  # flags that go to transformers' from_pretrained


def add_model(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """Declare the model and how it is loaded."""
    parser.allow_abbrev = False  # a script's `--s` must not change its meaning when a field is added
    parser.epilog = (
        f"Architectures: {', '.join(registry.available('adapters'))}. "
        f"Scorers: {', '.join(registry.available('scorers'))}."
    )
    add = parser.add_argument
    where: dict[str, Any] = {"metavar": "MODEL"} if positional else {"required": True}
    add("model" if positional else "--model", help="model id on the Hub, or a local folder", **where)
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="dtype to load in")
    add("--gguf-file", metavar="FILE", help="GGUF file inside the model's folder or repository")
    add_trust(parser)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Declare whose code may run."""
    parser.add_argument(
        "--trust-remote-code",
        action="store_const",
        const=True,
        help="run Python code that comes with the models, their tokenizers and processors; read it first (default: "
        "never run it)",
    )


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Declare where the configurations come from, and how the result is written."""
    add = parser.add_argument
    add("--recipe", type=Path, metavar="FILE", help="YAML or JSON recipe; flags override its values")
    add_layout(parser)


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Declare how the layers are written."""
    add = parser.add_argument
    add(
        "--layout",
        choices=("auto", "stock", "compact", "padded"),
        default="auto",
        help="how the model is written: 'stock' loads without this package and needs equal widths in "
        "every layer, 'compact' takes any, 'padded' fills up with zeros to the widest layer, which takes more room and "
        "loads without this package; 'auto' chooses one of the first two (default)",
    )
    add(
        "--class-switch",
        action="store_true",
        help="write a Llama as the Mistral that computes the same, if only so its number of heads can be 'stock'",
    )


def add_card(parser: argparse.ArgumentParser) -> None:
    """Declare what the model card says that no file may know."""
    add = parser.add_argument
    add("--base-model", metavar="ID", help="id on the Hub of the dense model, for the card, where --model is a folder")
    add(
        "--license",
        metavar="NAME",
        help="the Hub's name of the licence, e.g. apache-2.0 (default: of the source's card)",
    )


def card_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was given of the flags of `add_card`, checked.

    Raises:
        InvalidConfig: `--base-model` can be no Hub id, or the Hub has no such licence.
    """
    if args.base_model is None and args.license is None:
        return {}
    from optimum_prune.integrations.metadata import given_metadata  # here, because it brings torch

    return given_metadata(args.base_model, args.license)


def add_storage(parser: argparse.ArgumentParser) -> None:
    """Declare how the weights are written."""
    parser.add_argument(
        "--storage",
        choices=("dense", "packed"),
        default="dense",
        help="'packed' stores a zero as one bit, and loads with this package alone (default: dense)",
    )


def add_evaluation(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Declare what is measured on, and how much of it; and where the model is loaded to for that."""
    add = parser.add_argument
    add("--evaluate", required=required, metavar="SOURCE", help="measure on this data; of the kinds of calibration's")
    add_amount(parser, EVALUATION)
    split = "split of the evaluation data: of a dataset id or of a folder (default: train)"
    add(f"--{EVALUATION}split".replace("_", "-"), metavar="NAME", default=argparse.SUPPRESS, help=split)
    add_device_map(parser)


def add_amount(parser: argparse.ArgumentParser, prefix: str = "") -> None:
    """Declare the size of the evaluation data."""
    for name, what in (("num_samples", "sequences"), ("seq_len", "tokens in each")):
        default = " (default: 32)" if name == "num_samples" else " (default: 2048, or the model's limit)"
        flag = f"--{prefix}{name}".replace("_", "-")
        parser.add_argument(
            flag, type=int, metavar="N", default=argparse.SUPPRESS, help=f"{what} to measure on{default}"
        )


def add_device_map(parser: argparse.ArgumentParser) -> None:
    """Declare the devices of the model."""
    parser.add_argument("--device-map", metavar="MAP", help="where to load to, e.g. 'auto', 'cpu' or 'cuda'")


def add_no_latency(parser: argparse.ArgumentParser) -> None:
    """Declare an evaluation without timing."""
    parser.add_argument(
        "--no-latency",
        action="store_false",
        dest="latency",
        help="do not measure latency (prefill and decoding)",
    )


def check_evaluation_flags(args: argparse.Namespace) -> None:
    """Refuse an evaluation that cannot be made, and how much of one that nobody asked for.

    Raises:
        InvalidConfig: naming the flags.
    """
    if args.evaluate is not None:
        check_evaluation(args.evaluate)
        return
    given = [f"--{EVALUATION}{name}".replace("_", "-") for name in given_fields(args, CalibrationConfig, EVALUATION)]
    if not args.latency:
        given.append("--no-latency")
    if given:
        flags = ", ".join(given)
        raise InvalidConfig(f"{flags} has no meaning without --evaluate SOURCE.")


def evaluation_options(args: argparse.Namespace, data: CalibrationConfig | RecoveryConfig) -> dict[str, Any]:
    """Return the options of the evaluation data; its columns are those of the other data of the run, if it has any."""
    from optimum_prune.calibration.files import COLUMNS, options_of

    usable = options_of(args.evaluate)
    columns = {name: value for name in COLUMNS if name in usable and (value := getattr(data, name)) is not None}
    return columns | given_fields(args, CalibrationConfig, EVALUATION)


def add_configs(parser: argparse.ArgumentParser) -> None:
    """Declare the fields of the configurations."""
    # the fields of calibration and induction are flags of their own
    add_fields(parser.add_argument_group("pruning"), PruningConfig, without=("calibration", "induction"))
    add_fields(parser.add_argument_group("calibration"), CalibrationConfig, prefix=CALIBRATION)
    induction = parser.add_argument_group(
        "induction", "Masks are learned where any of these is given; see --scorer si."
    )
    add_fields(induction, InductionConfig, prefix=INDUCTION)


def loading_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was given of the flags that go to `from_pretrained`."""
    return {name: value for name in LOADING if (value := getattr(args, name, None)) is not None}


def read_config(args: argparse.Namespace) -> PruningConfig:
    """Merge the recipe and the flags, then check the result: a recipe may leave what a flag gives."""
    recipe = read_recipe(args.recipe) if args.recipe else {}
    recipe.pop(RECOVERY_SECTION, None)  # of `run`, which reads it by itself
    calibration = CalibrationConfig.from_dict(recipe.get("calibration", {}))
    calibration = replace(calibration, **given_fields(args, CalibrationConfig, CALIBRATION))
    induction = recipe.get("induction")
    if given := given_fields(args, InductionConfig, INDUCTION):
        induction = replace(InductionConfig.from_dict(induction or {}), **given)
    parts = {"calibration": calibration, "induction": induction}
    return PruningConfig.from_dict({**recipe, **given_fields(args, PruningConfig), **parts})


def add_fields(group: Any, config: type, prefix: str = "", without: Sequence[str] = ()) -> None:
    """Declare a flag for every field of a configuration."""
    for option in fields(config):
        if option.name not in without:
            default = "" if option.default is None else f" (default: {option.default})"
            group.add_argument(
                f"--{prefix}{option.name}".replace("_", "-"),
                default=argparse.SUPPRESS,  # a flag that is not given leaves the recipe's value alone
                help=f"{option.metadata['help']}{default}".replace("%", "%%"),
                **_value(option),
            )


def _value(option: Field) -> dict[str, Any]:
    """Translate a field's type into what argparse calls it."""
    kinds = typing.get_args(option.type) or (option.type,)
    if dict[str, Any] in kinds:
        return {"nargs": "+", "metavar": "NAME=VALUE", "action": _Options}
    if list[str] in kinds:
        return {"nargs": "+", "metavar": "NAME"}
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if float in kinds:
        return {"type": float if option.default is None else _number_or_word, "metavar": "X"}
    if int in kinds:
        return {"type": int, "metavar": "N"}
    return {"metavar": "NAME"}


class _Options(argparse.Action):
    """Reads `name=value ...`; values as YAML reads them (2, 0.5, true, [2, 98], feature)."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        import yaml  # here, because this module is imported to print help

        options = {}
        for given in values:
            name, equals, value = given.partition("=")
            try:
                read = yaml.safe_load(value)
            except yaml.YAMLError:
                read, equals = None, ""
            if not (name and equals and value):
                raise argparse.ArgumentError(self, f"expected name=value, got {given!r}")
            if name in options:
                raise argparse.ArgumentError(self, f"{name!r} is given twice")
            options[name] = read
        setattr(namespace, self.dest, options)


def _number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def given_fields(args: argparse.Namespace, config: type, prefix: str = "") -> dict[str, Any]:
    """Return what was given of a configuration's fields."""
    flags = {option.name: f"{prefix}{option.name}" for option in fields(config)}
    return {name: getattr(args, flag) for name, flag in flags.items() if hasattr(args, flag)}
