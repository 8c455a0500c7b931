"""The command `optimum-cli prune` and its `run`; torch comes with the work."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

# not from `optimum.commands`, a namespace without names: the import would break every command of optimum-cli
from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from optimum_prune.commands.compare import CompareCommand
from optimum_prune.commands.flags import (
    EVALUATION,
    OneLineParser,
    add_configs,
    add_evaluation,
    add_model,
    add_recipe,
    attempt,
    evaluation_options,
    given_fields,
    loading_options,
    read_config,
)
from optimum_prune.commands.plan import PlanCommand
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import InvalidConfig
from optimum_prune.measurements import check_evaluation


class RunCommand(BaseOptimumCLICommand):
    """`optimum-cli prune run`: load, prune, evaluate if asked, save."""

    COMMAND = CommandInfo("run", help="Prune a model and save it.")
    parser: argparse.ArgumentParser
    args: argparse.Namespace

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        """Declare the flags."""
        add_model(parser)
        add_recipe(parser)
        add = parser.add_argument
        add("--output", required=True, type=Path, metavar="DIR", help="folder to save to")
        add(
            "--storage",
            choices=("dense", "packed"),
            default="dense",
            help="'packed' stores a zero as one bit, and loads with this package alone (default: dense)",
        )
        add_evaluation(parser, required=False)
        add_configs(parser)

    def run(self) -> None:
        """Do what was asked."""
        attempt(_run, self.args, self.parser)


class PruneCommand(BaseOptimumCLICommand):
    """`optimum-cli prune`: prints help; the work is in its subcommands."""

    COMMAND = CommandInfo("prune", help="Prune transformers models.")
    SUBCOMMANDS = tuple(
        CommandInfo(command.COMMAND.name, help=command.COMMAND.help, subcommand_class=command)
        for command in (RunCommand, PlanCommand, CompareCommand)
    )

    @BaseOptimumCLICommand.subparsers.getter
    def subparsers(self) -> Any:
        """Parse subcommands with our own parser."""
        if not hasattr(self, "_subparsers"):
            self._subparsers = self.parser.add_subparsers(parser_class=OneLineParser)
        return self._subparsers


def _run(args: argparse.Namespace) -> None:
    config = read_config(args)
    _check_output(args.output, args.model)
    if args.evaluate is not None:
        check_evaluation(args.evaluate)
    elif given := given_fields(args, CalibrationConfig, EVALUATION):
        flags = ", ".join(f"--{EVALUATION}{name}".replace("_", "-") for name in given)
        raise InvalidConfig(f"{flags} has no meaning without --evaluate SOURCE.")

    from optimum_prune.calibration.sources import open_source
    from optimum_prune.integrations.loading import load_skeleton
    from optimum_prune.planning.planner import make_plan
    from optimum_prune.pruner import Pruner  # here, because it brings torch

    loading = loading_options(args)
    # Refuse what cannot be before hours of work, not after.
    if args.evaluate is not None:
        open_source(CalibrationConfig(args.evaluate, **evaluation_options(args, config)))
    make_plan(load_skeleton(args.model, **loading), config, skeleton=True).check_layout(args.layout)
    pruner = Pruner.from_pretrained(args.model, **loading)
    print(pruner.prune(config))
    try:
        if args.evaluate is not None:
            pruner.evaluate(args.evaluate, **evaluation_options(args, config))
            print(pruner.comparison())
    finally:  # an evaluation that fails must not cost the pruned model
        pruner.save_pretrained(args.output, layout=args.layout, storage=args.storage)
        print(f"Saved to {args.output}")


def _check_output(output: Path, model: str) -> None:
    """Refuse an output folder that cannot be written, or must not, before hours of work go into it.

    Raises:
        InvalidConfig: naming the folder and the reason.
    """
    name = f"--output {str(output)!r}"
    try:
        if output.resolve() == Path(model).resolve():
            raise InvalidConfig(f"{name} is the model's own folder; choose another.")
        if output.exists() and not output.is_dir():
            raise InvalidConfig(f"{name} is a file; choose a folder.")
        if Path.cwd().is_relative_to(output.resolve()):
            raise InvalidConfig(f"{name} holds the working directory; choose another.")
        if output.exists() and any(output.iterdir()) and not (output / "config.json").exists():
            raise InvalidConfig(f"{name} is not empty and holds no checkpoint to replace; choose another.")
        parent = next(folder for folder in output.absolute().parents if folder.exists())
        with tempfile.TemporaryDirectory(dir=parent, prefix=".optimum-prune-"):
            pass  # the only answer that holds on every file system
    except OSError as error:
        raise InvalidConfig(f"{name} cannot be written: {error.strerror}.") from error
