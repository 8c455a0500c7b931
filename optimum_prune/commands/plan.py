"""The command `optimum-cli prune plan`: what a run would keep and save; no weight is read."""

import argparse
from pathlib import Path

# not from `optimum.commands`, a namespace without names: the import would break every command of optimum-cli
from optimum.commands.base import CommandInfo

from optimum_prune.commands.command import Command
from optimum_prune.commands.flags import add_configs, add_model, add_recipe, loading_options, read_config
from optimum_prune.commands.output import write_json


class PlanCommand(Command):
    """`optimum-cli prune plan`: print what `run` would do with the same flags, and refuse what it would refuse."""

    COMMAND = CommandInfo("plan", help="Show what pruning would keep and save, without loading the model.")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        """Declare the flags."""
        add_model(parser)
        add_recipe(parser)
        add = parser.add_argument
        add(
            "--tensor-parallel",
            type=int,
            default=1,
            metavar="N",
            help="show only counts of heads and MLP channels that so many devices can divide (default: 1)",
        )
        add("--json", type=Path, metavar="FILE", help="write the plan to this file, too")
        add_configs(parser)

    @staticmethod
    def work(args: argparse.Namespace) -> None:
        """Do what was asked."""
        config = read_config(args)

        from optimum_prune.integrations.loading import load_skeleton
        from optimum_prune.planning.planner import make_plan  # here, because it brings torch

        how = {"layout": args.layout, "class_switch": args.class_switch}
        plan = make_plan(
            load_skeleton(args.model, **loading_options(args)), config, args.tensor_parallel, skeleton=True, **how
        )
        if args.json is not None:
            write_json(args.json, plan.to_dict())
        print(plan)
