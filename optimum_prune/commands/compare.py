"""The command `optimum-cli prune compare`: several scorers or settings, measured side by side."""

import argparse
from pathlib import Path

# not from `optimum.commands`, a namespace without names: the import would break every command of optimum-cli
from optimum.commands.base import CommandInfo

from optimum_prune.commands.command import Command
from optimum_prune.commands.flags import (
    CALIBRATION,
    add_configs,
    add_evaluation,
    add_model,
    evaluation_options,
    given_fields,
    loading_options,
)
from optimum_prune.comparing.recipe import joined, read_settings
from optimum_prune.config import CalibrationConfig, PruningConfig
from optimum_prune.errors import InvalidConfig
from optimum_prune.measurements import check_evaluation


class CompareCommand(Command):
    """`optimum-cli prune compare`: try every setting on one model, write a table and a picture; save no model."""

    COMMAND = CommandInfo("compare", help="Try several scorers or settings, and measure each.")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        """Declare the flags."""
        add_model(parser)
        add = parser.add_argument
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
        add_evaluation(parser, required=True)
        add_configs(parser)

    @staticmethod
    def work(args: argparse.Namespace) -> None:
        """Do what was asked."""
        settings = _settings(args)
        check_evaluation(args.evaluate)

        from optimum_prune.calibration.refusals import check_calibration
        from optimum_prune.comparing.running import check_directory
        from optimum_prune.comparing.trials import check_draw, prepare
        from optimum_prune.integrations.loading import load_skeleton
        from optimum_prune.pruner import Pruner  # here, because it brings torch

        loading, options = loading_options(args), evaluation_options(args, next(iter(settings.values())).calibration)
        # Refuse what cannot be before the model is loaded.
        skeleton = load_skeleton(args.model, **loading)
        check_calibration(CalibrationConfig(args.evaluate, **options), skeleton, predicts=True, skeleton=True)
        check_draw(skeleton, prepare(skeleton, settings, args.sparsities, skeleton=True))
        check_directory(args.output)
        pruner = Pruner.from_pretrained(args.model, **loading)
        print(pruner.compare(settings, args.evaluate, args.sparsities, args.output, **options))
        print(f"Saved to {args.output}")


def _settings(args: argparse.Namespace) -> dict[str, PruningConfig]:
    """Merge the flags into every setting.

    Raises:
        InvalidConfig: two flags say the same, or a setting is not allowed.
    """
    given = given_fields(args, PruningConfig) | {"calibration": given_fields(args, CalibrationConfig, CALIBRATION)}
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
