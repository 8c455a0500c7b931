"""The command `optimum-cli prune convert`: a pruned checkpoint in another layout; the numbers stay."""

import argparse
from pathlib import Path

# not from `optimum.commands`, a namespace without names: the import would break every command of optimum-cli
from optimum.commands.base import CommandInfo

from optimum_prune.commands.command import Command
from optimum_prune.commands.flags import add_card, add_layout, add_storage, add_trust, card_options, loading_options
from optimum_prune.commands.output import check_output, save
from optimum_prune.errors import InvalidConfig


class ConvertCommand(Command):
    """`optimum-cli prune convert`: load what was pruned, and save it otherwise, with its report and a new card."""

    COMMAND = CommandInfo("convert", help="Write a pruned model in another layout.")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        """Declare the flags."""
        parser.allow_abbrev = False
        parser.add_argument("model", metavar="DIR", help="folder or Hub id of a pruned model")
        parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder to save to")
        add_layout(parser)
        add_storage(parser)
        add_card(parser)
        add_trust(parser)

    @staticmethod
    def work(args: argparse.Namespace) -> None:
        """Do what was asked."""
        check_output(args.output, args.model)
        card_options(args)

        from optimum_prune.integrations.layouts import check_choice
        from optimum_prune.integrations.loading import load_skeleton
        from optimum_prune.layouts.forms import check_layout
        from optimum_prune.pruner import Pruner  # here, because it brings torch

        check_choice(args.layout, args.storage)
        # Refuse what cannot be before the weights are read.
        loading = loading_options(args)
        skeleton = load_skeleton(args.model, **loading)
        record = getattr(skeleton.config, "pruning_config", None)
        if record is None:
            raise InvalidConfig(
                f"{args.model} holds no pruned model (its config.json has no pruning_config), so there is nothing to "
                "convert. Prune it first: optimum-cli prune run."
            )
        # How wide layers are without their padding, only the weights tell.
        check_layout(skeleton, "auto" if record.get("layout") == "padded" else args.layout, args.class_switch)
        pruner = Pruner.from_pretrained(args.model, **loading)
        if args.layout != "padded":
            pruner.unpad()
        save(pruner, args)
