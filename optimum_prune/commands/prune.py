"""The command `optimum-cli prune` and its `run`; torch comes with the work."""

import argparse
from pathlib import Path
from typing import Any

# not from `optimum.commands`, a namespace without names: the import would break every command of optimum-cli
from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from optimum_prune.commands.command import Command, OneLineParser
from optimum_prune.commands.compare import CompareCommand
from optimum_prune.commands.convert import ConvertCommand
from optimum_prune.commands.evaluate import EvaluateCommand
from optimum_prune.commands.flags import (
    add_card,
    add_configs,
    add_evaluation,
    add_model,
    add_no_latency,
    add_recipe,
    add_storage,
    card_options,
    check_evaluation_flags,
    evaluation_options,
    loading_options,
    read_config,
)
from optimum_prune.commands.output import check_output, save
from optimum_prune.commands.plan import PlanCommand
from optimum_prune.commands.push import PushCommand, add_publishing, destination
from optimum_prune.commands.recover import RecoverCommand, add_recovery, check_apart, check_dense, read_recovery
from optimum_prune.commands.report import ReportCommand
from optimum_prune.config import CalibrationConfig


class RunCommand(Command):
    """`optimum-cli prune run`: load, prune, evaluate if asked, save."""

    COMMAND = CommandInfo("run", help="Prune a model and save it.")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        """Declare the flags."""
        add_model(parser)
        add_recipe(parser)
        add = parser.add_argument
        add("--output", required=True, type=Path, metavar="DIR", help="folder to save to")
        add_storage(parser)
        add_card(parser)
        add_evaluation(parser, required=False)
        add_no_latency(parser)
        add_publishing(parser)
        add_configs(parser)
        add_recovery(parser)

    @staticmethod
    def work(args: argparse.Namespace) -> None:
        """Do what was asked."""
        config = read_config(args)
        check_output(args.output, args.model)
        card_options(args)
        check_evaluation_flags(args)
        measured = evaluation_options(args, config.calibration)
        recovery = read_recovery(args)
        to = destination(args)

        from optimum_prune.calibration.refusals import check_calibration
        from optimum_prune.integrations.hub import prepare, upload
        from optimum_prune.integrations.layouts import check_choice
        from optimum_prune.integrations.loading import load_skeleton
        from optimum_prune.planning.planner import make_plan
        from optimum_prune.pruner import Pruner  # here, because it brings torch
        from optimum_prune.recovery.checkpoints import check_directory
        from optimum_prune.recovery.recover import check_recovery
        from optimum_prune.wrapping import check_language_model

        loading = loading_options(args)
        # Refuse what cannot be before hours of work, not after.
        check_choice(args.layout, args.storage)
        skeleton = load_skeleton(args.model, **loading)
        if args.evaluate is not None:
            check_language_model(skeleton, "evaluated")
            check_calibration(CalibrationConfig(args.evaluate, **measured), skeleton, predicts=True, skeleton=True)
        make_plan(skeleton, config, skeleton=True, layout=args.layout, class_switch=args.class_switch)
        if recovery is not None:
            if getattr(skeleton.config, "pruning_config", None) is not None:
                how = "Prune first, then use `optimum-cli prune recover` with --dense MODEL."
                check_dense(recovery, args.recover_control, how)
            check_apart(recovery, args.layout)
            check_recovery(skeleton, recovery, calibration=config.calibration.source)
            if args.recover_directory is not None:
                check_directory(args.recover_directory)
        if to is not None:
            to = prepare(to)
        pruner = Pruner.from_pretrained(args.model, **loading)

        def evaluate() -> None:
            if args.evaluate is not None:
                pruner.evaluate(args.evaluate, latency=args.latency, **measured)

        if not pruner.is_pruned:
            evaluate()  # now: after pruning, the dense model would be a second one in memory
        report = pruner.prune(config)

        try:
            print(report)
            evaluate()
            if recovery is not None:
                save(pruner, args)  # what is pruned is not lost in hours of training
                print(pruner.recover(recovery, control=args.recover_control, directory=args.recover_directory))
                evaluate()
            if args.evaluate is not None:
                print(pruner.comparison())
        finally:  # an evaluation that fails must not cost the pruned model
            save(pruner, args)
        if to is not None:
            print(f"Uploaded to {upload(args.output, to)}")


class PruneCommand(BaseOptimumCLICommand):
    """`optimum-cli prune`: prints help; the work is in its subcommands."""

    COMMAND = CommandInfo("prune", help="Prune transformers models.")
    SUBCOMMANDS = tuple(
        CommandInfo(command.COMMAND.name, help=command.COMMAND.help, subcommand_class=command)
        for command in (
            RunCommand,
            PlanCommand,
            CompareCommand,
            EvaluateCommand,
            ReportCommand,
            ConvertCommand,
            RecoverCommand,
            PushCommand,
        )
    )

    @BaseOptimumCLICommand.subparsers.getter
    def subparsers(self) -> Any:
        """Parse subcommands with our own parser."""
        if not hasattr(self, "_subparsers"):
            self._subparsers = self.parser.add_subparsers(parser_class=OneLineParser)
        return self._subparsers
