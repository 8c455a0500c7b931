"""The command `optimum-cli prune push`, and the flags by which `run` publishes what it saved."""

import argparse
from pathlib import Path
from typing import Any

# not from `optimum.commands`, a namespace without names: the import would break every command of optimum-cli
from optimum.commands.base import CommandInfo

from optimum_prune.commands.command import Command
from optimum_prune.commands.flags import add_card, card_options
from optimum_prune.errors import InvalidConfig

HUB = "hub_"  # prefix of the flags of `run`, which would not speak of the Hub without it
OPTIONS: dict[str, dict[str, Any]] = {
    "private": {"action": "store_true", "help": "let only the owners of a new repository see it"},
    "revision": {"metavar": "BRANCH", "help": "branch to upload to; made if it is new (default: main)"},
    "create_pr": {"action": "store_true", "help": "propose the files by a pull request"},
    "commit_message": {"metavar": "TEXT", "help": "message of the commit, and title of the pull request"},
}
"""Field of a `Destination` -> what argparse is told of its flag."""


class PushCommand(Command):
    """`optimum-cli prune push`: upload a checkpoint that is already saved."""

    COMMAND = CommandInfo("push", help="Upload a saved model to the Hub, in place of an older one.")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        """Declare the flags."""
        parser.allow_abbrev = False
        parser.add_argument("directory", type=Path, metavar="DIR", help="folder of the saved model")
        parser.add_argument("repo_id", metavar="REPO_ID", help="repository on the Hub: user/name; made if it is new")
        _add_options(parser)
        add_card(parser)

    @staticmethod
    def work(args: argparse.Namespace) -> None:
        """Do what was asked."""
        from optimum_prune.integrations import hub  # here, because it brings torch

        to = hub.Destination(args.repo_id, **_options(args), **card_options(args))
        hub.check_directory(args.directory, to)
        to = hub.prepare(to)
        print(f"Uploaded to {hub.upload(args.directory, to)}")


def add_publishing(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `run`."""
    group = parser.add_argument_group(
        "publishing",
        "The repository is made, and the right to write there tried, before anything is pruned. The token is that of "
        "`hf auth login` or HF_TOKEN.",
    )
    group.add_argument("--push-to-hub", metavar="REPO_ID", help="upload what was saved to this repository: user/name")
    _add_options(group, HUB)


def destination(args: argparse.Namespace) -> Any:
    """Return where `run` publishes to, as `hub.prepare` takes it; None where it does not.

    Raises:
        InvalidConfig: there are flags that say how, and none that says where.
    """
    options = _options(args)
    if args.push_to_hub is None:
        if options:
            flags = ", ".join(_flag(name, HUB) for name in options)
            raise InvalidConfig(f"{flags} has no meaning without --push-to-hub REPO_ID.")
        return None
    from optimum_prune.integrations.hub import Destination  # as above

    return Destination(args.push_to_hub, **options)


def _add_options(parser: Any, prefix: str = "") -> None:
    for name, settings in OPTIONS.items():
        parser.add_argument(_flag(name, prefix), dest=f"{HUB}{name}", default=argparse.SUPPRESS, **settings)


def _flag(name: str, prefix: str = "") -> str:
    return "--" + (name if name == "private" else f"{prefix}{name}").replace("_", "-")


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was given, by field of a `Destination`."""
    return {name: getattr(args, f"{HUB}{name}") for name in OPTIONS if hasattr(args, f"{HUB}{name}")}
