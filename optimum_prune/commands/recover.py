"""The command `optimum-cli prune recover`, and the flags by which `run` does the same after pruning."""

import argparse
from pathlib import Path
from typing import Any

# not from `optimum.commands`, a namespace without names: the import would break every command of optimum-cli
from optimum.commands.base import CommandInfo

from optimum_prune.checks import refuse
from optimum_prune.commands.command import Command
from optimum_prune.commands.flags import (
    RECOVERY_SECTION,
    add_card,
    add_evaluation,
    add_fields,
    add_layout,
    add_model,
    add_no_latency,
    add_storage,
    card_options,
    check_evaluation_flags,
    evaluation_options,
    given_fields,
    loading_options,
)
from optimum_prune.commands.output import check_output, save
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import InvalidConfig
from optimum_prune.options import read_recipe
from optimum_prune.recovery.config import RecoveryConfig

RECOVERY = "recover_"
"""Prefix of the flags of `run` that are fields of RecoveryConfig."""


class RecoverCommand(Command):
    """`optimum-cli prune recover`: train LoRA adapters on a pruned checkpoint, and merge them."""

    COMMAND = CommandInfo("recover", help="Train a pruned model by LoRA, zeros and sizes kept, and save it.")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        """Declare the flags."""
        add_model(parser)
        add = parser.add_argument
        recipe = f"YAML or JSON file of the fields below, or of a run with a section '{RECOVERY_SECTION}'"
        add("--recipe", type=Path, metavar="FILE", help=f"{recipe}; flags override it")
        add("--output", required=True, type=Path, metavar="DIR", help="folder to save to")
        add("--dense", metavar="MODEL", help="the dense model: teacher of losses 'kl' and 'mix', and the control")
        _add_how(parser, "")
        add_layout(parser)
        add_storage(parser)
        add_card(parser)
        add_evaluation(parser, required=False)
        add_no_latency(parser)
        add_fields(parser.add_argument_group("recovery"), RecoveryConfig)

    @staticmethod
    def work(args: argparse.Namespace) -> None:
        """Do what was asked."""
        recipe = read_recipe(args.recipe) if args.recipe else {}
        config = _merged(recipe.get(RECOVERY_SECTION, recipe), given_fields(args, RecoveryConfig))
        check_output(args.output, args.model)
        card_options(args)
        check_evaluation_flags(args)
        measured = evaluation_options(args, config)
        if args.dense is None:
            check_dense(config, args.control, "Name it by --dense MODEL.")

        from optimum_prune.calibration.refusals import check_calibration
        from optimum_prune.integrations.layouts import check_choice, check_padding
        from optimum_prune.integrations.loading import load_skeleton
        from optimum_prune.layouts.forms import check_layout
        from optimum_prune.pruner import Pruner  # here, because it brings torch
        from optimum_prune.recovery.arguments import check_trainer_options
        from optimum_prune.recovery.checkpoints import check_directory
        from optimum_prune.recovery.recover import check_recovery

        loading = loading_options(args)
        check_choice(args.layout, args.storage)
        skeleton = load_skeleton(args.model, **loading)
        if args.evaluate is not None:
            check_calibration(CalibrationConfig(args.evaluate, **measured), skeleton, predicts=True, skeleton=True)
        check_layout(skeleton, args.layout, args.class_switch)
        check_apart(config, args.layout)
        if config.dataset is not None:
            check_recovery(skeleton, config)
        else:  # which data that is, the report of the checkpoint says
            check_trainer_options(config.trainer_options)
        if args.dense is not None:
            load_skeleton(args.dense, trust_remote_code=args.trust_remote_code)
        if args.directory is not None:
            check_directory(args.directory)
        pruner = Pruner.from_pretrained(args.model, **loading)
        check_padding(pruner.model, args.storage)
        report = pruner.recover(config, control=args.control, dense=args.dense, directory=args.directory)
        try:
            print(report)
            if args.evaluate is not None:
                pruner.evaluate(args.evaluate, latency=args.latency, **measured)
                print(pruner.comparison())
        finally:  # an evaluation that fails must not cost the trained model
            save(pruner, args)


def add_recovery(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `run`."""
    group = parser.add_argument_group("recovery", "What pruning cost is learned back where --recover is given.")
    group.add_argument(
        "--recover",
        nargs="?",
        const=None,
        default=argparse.SUPPRESS,
        metavar="SOURCE",
        help="train LoRA adapters on this data, of the kinds of calibration's; without SOURCE on half text that the "
        "dense model writes itself, half the calibration data",
    )
    _add_how(group, "recover-")
    add_fields(group, RecoveryConfig, prefix=RECOVERY, without=("dataset",))


def read_recovery(args: argparse.Namespace) -> RecoveryConfig | None:
    """Merge the recipe's section and the flags of `run`; None where nothing is to be recovered.

    Raises:
        InvalidConfig: fields of a recovery are given, and no recovery.
    """
    recipe = read_recipe(args.recipe) if args.recipe else {}
    # an empty section asks for the defaults
    section = (recipe[RECOVERY_SECTION] or {}) if RECOVERY_SECTION in recipe else None
    given = given_fields(args, RecoveryConfig, RECOVERY)
    if section is None and not hasattr(args, "recover"):
        if given or args.recover_control or args.recover_directory:
            raise InvalidConfig("--recover-... flags have no meaning without --recover [SOURCE].")
        return None
    dataset = {"dataset": args.recover} if hasattr(args, "recover") and args.recover is not None else {}
    return _merged(section, {**dataset, **given})


def check_dense(config: RecoveryConfig, control: bool, how: str) -> None:
    """Refuse what needs the dense model, where there is none.

    Args:
        config: may ask for a teacher.
        control: whether the dense model is to be trained too.
        how: what to do instead.

    Raises:
        InvalidConfig: it is needed.
    """
    if config.uses_teacher or control:
        what = f"loss={config.loss!r} asks the dense model" if config.uses_teacher else "The control is the dense model"
        raise InvalidConfig(f"{what}, and a pruned checkpoint does not tell where that is. {how}")


def check_apart(config: RecoveryConfig, layout: str) -> None:
    """Refuse padding under an adapter that is not merged.

    Raises:
        InvalidConfig: both are asked for.
    """
    if layout == "padded" and config.merge == "none":
        raise InvalidConfig(
            "merge='none' does not go with layout='padded': the adapter fits the model without padding. Use "
            "layout='compact', or another merge."
        )


def _merged(recipe: Any, given: dict[str, Any]) -> RecoveryConfig:
    """Merge fields of a recipe and flags, then check the result."""
    if recipe is not None and not isinstance(recipe, dict):
        raise refuse(f"{RECOVERY_SECTION} of a recipe", "a mapping of fields", recipe)
    return RecoveryConfig.from_dict({**(recipe or {}), **given})


def _add_how(parser: Any, prefix: str) -> None:
    parser.add_argument(
        f"--{prefix}control",
        action="store_true",
        help="train the dense model alike, to see how much of the gain is not recovery",
    )
    parser.add_argument(
        f"--{prefix}directory",
        type=Path,
        metavar="DIR",
        help="folder for checkpoints of the training; a run that was stopped goes on from them",
    )
