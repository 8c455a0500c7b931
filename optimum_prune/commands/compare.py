"""The command `optimum-cli prune compare`: several scorers or settings, measured side by side."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

# not from `optimum.commands`, a namespace without names: the import would break every command of optimum-cli
from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from optimum_prune import registry
from optimum_prune.commands.flags import CALIBRATION, add_configs, attempt, loading_options
from optimum_prune.comparing.recipe import joined, read_settings
from optimum_prune.config import CalibrationConfig, PruningConfig
from optimum_prune.errors import InvalidConfig
from optimum_prune.measurements import check_evaluation


class CompareCommand(BaseOptimumCLICommand):
    """`optimum-cli prune compare`: try every setting on one model, write a table and a picture; save no model."""

    COMMAND = CommandInfo("compare", help="Try several scorers or settings, and measure each.")
    parser: argparse.ArgumentParser
    args: argparse.Namespace

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        """Declare the flags."""
        parser.allow_abbrev = False  # a script's `--s` must not change its meaning when a field is added
        parser.epilog = f"Scorers: {', '.join(registry.available('scorers'))}."
        add = parser.add_argument
        add("--model", required=True, help="model id on the Hub, or a local folder")
        add("--evaluate", required=True, metavar="SOURCE", help="what to measure on; the same kinds as calibration's")
        add("--output", required=True, type=Path, metavar="DIR", help="folder for comparison.json, .md and .png")
        what = parser.add_mutually_exclusive_group(required=True)
        what.add_argument("--scorers", nargs="+", metavar="NAME", help="scorers to compare; other flags hold for all")
        what.add_argument(
            "--settings",
            type=Path,
            metavar="FILE",
            help="YAML or JSON file with 'base', fields that all have, and 'settings', name -> fields that differ; "
            "flags override 'base'",
        )
        add("--sparsities", nargs="+", type=float, metavar="X", help="fractions to remove; every setting at each")
        add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="dtype to load in")
        add("--gguf-file", metavar="FILE", help="GGUF file inside the model's folder or repository")
        add("--device-map", metavar="MAP", help="where to load to, e.g. 'auto', 'cpu' or 'cuda'")
        add_configs(parser)

    def run(self) -> None:
        """Do what was asked."""
        attempt(_compare, self.args, self.parser)


def _compare(args: argparse.Namespace) -> None:
    settings = _settings(args)
    check_evaluation(args.evaluate)

    from optimum_prune.calibration.sources import open_source
    from optimum_prune.comparing.running import check_directory
    from optimum_prune.comparing.trials import check_draw, prepare
    from optimum_prune.integrations.loading import load_skeleton
    from optimum_prune.pruner import Pruner  # here, because it brings torch

    loading, columns = loading_options(args), evaluation_columns(next(iter(settings.values())))
    # Refuse what cannot be before the model is loaded.
    open_source(CalibrationConfig(args.evaluate, **columns))
    skeleton = load_skeleton(args.model, **loading)
    check_draw(skeleton, prepare(skeleton, settings, args.sparsities, skeleton=True))
    check_directory(args.output)
    pruner = Pruner.from_pretrained(args.model, **loading)
    print(pruner.compare(settings, args.evaluate, args.sparsities, args.output, **columns))
    print(f"Saved to {args.output}")


def evaluation_columns(config: PruningConfig) -> dict[str, Any]:
    """Return the columns that calibration data is read from: evaluation data of the same kind has them too."""
    names = ("text_column", "target_column", "image_column")
    return {name: value for name in names if (value := getattr(config.calibration, name)) is not None}


def _settings(args: argparse.Namespace) -> dict[str, PruningConfig]:
    """Merge the flags into every setting.

    Raises:
        InvalidConfig: two flags say the same, or a setting is not allowed.
    """
    given = _given(args, PruningConfig) | {"calibration": _given(args, CalibrationConfig, CALIBRATION)}
    if args.sparsities is not None:
        if "sparsity" in given:
            raise InvalidConfig("Give --sparsity or --sparsities, not both.")
        given["sparsity"] = args.sparsities[0]  # a setting must have one; it is tried at all of them
    if args.settings is not None:
        return read_settings(args.settings, given)
    if "scorer" in given:
        raise InvalidConfig("Give --scorer with --settings, or --scorers; not both.")
    if repeated := [name for name in args.scorers if args.scorers.count(name) > 1]:
        raise InvalidConfig(f"--scorers names {repeated[0]!r} twice.")
    return {name: joined(name, given, {"scorer": name}) for name in args.scorers}


def _given(args: argparse.Namespace, config: type, prefix: str = "") -> dict[str, Any]:
    flags = {option.name: f"{prefix}{option.name}" for option in fields(config)}
    return {name: getattr(args, flag) for name, flag in flags.items() if hasattr(args, flag)}
