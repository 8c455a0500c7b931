"""The command `optimum-cli prune report`: what a pruned checkpoint says of itself; no weight is read."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# not from `optimum.commands`, a namespace without names: the import would break every command of optimum-cli
from optimum.commands.base import CommandInfo

from optimum_prune.commands.command import Command, printable
from optimum_prune.errors import InvalidConfig


class ReportCommand(Command):
    """`optimum-cli prune report`: print the tables of a pruned checkpoint, and draw it if asked."""

    COMMAND = CommandInfo("report", help="Show what was pruned and measured, without loading the model.")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        """Declare the flags."""
        parser.allow_abbrev = False
        add = parser.add_argument
        add("model", metavar="DIR", help="folder of a pruned model, or its id on the Hub; no weights are downloaded")
        add("--html", type=Path, metavar="FILE", help="write tables and pictures into this file, a page by itself")
        add("--plots", type=Path, metavar="DIR", help="draw the pictures into this folder, as PNG files")

    @staticmethod
    def work(args: argparse.Namespace) -> None:
        """Do what was asked."""
        from optimum_prune.integrations.page import write_page
        from optimum_prune.integrations.reading import open_report, showing
        from optimum_prune.measurements import comparison
        from optimum_prune.plots.pictures import save_pictures
        from optimum_prune.plots.style import check_installed  # here, because they bring torch

        if args.html is not None or args.plots is not None:
            check_installed()
        report, evaluations = open_report(args.model)
        print(printable(str(report)))
        if evaluations:
            print(printable(f"\n{comparison(evaluations)}"))
        written: list[Path] = []
        if args.html is not None:
            with showing(args.model), _writing("--html", args.html):
                written.append(write_page(args.html, report, evaluations, title=_name(args.model)))
        if args.plots is not None:
            with showing(args.model), _writing("--plots", args.plots):
                args.plots.mkdir(parents=True, exist_ok=True)
                written += save_pictures(args.plots, report, evaluations)
        for path in written:
            print(f"Saved to {path}")


def _name(model: str) -> str:
    """Return how a page calls a checkpoint: a Hub id, or the name of the folder, never the path to it."""
    return Path(model).resolve().name if Path(model).exists() else model


@contextmanager
def _writing(flag: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidConfig(f"{flag} {str(path)!r} cannot be written: {error.strerror}.") from error
