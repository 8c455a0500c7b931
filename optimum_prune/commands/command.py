"""How a command begins and ends: what it is, and what becomes of a user's mistake."""

import argparse
import io
import logging
import os
import sys
import warnings
from difflib import get_close_matches
from typing import Any, NoReturn

# not from `optimum.commands`, a namespace without names: the import would break every command of optimum-cli
from optimum.commands.base import BaseOptimumCLICommand

from optimum_prune.errors import PruningError, PublishError

CLOSED = 141  # what shells report of a program that wrote to nobody
INTERRUPTED = 130  # what shells report of a program that ended by Ctrl-C


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaint about a user's mistake is one line, without the page of usage before it."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: error: {printable(' '.join(message.split()))}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown flags with the nearest one; the root parser would refuse them with its own usage."""
        namespace, foreign = super().parse_known_args(args, namespace)
        if foreign:
            flags = [flag for action in self._actions for flag in action.option_strings]
            nearest = get_close_matches(foreign[0].partition("=")[0], flags, n=1)
            suggestion = f". Did you mean {nearest[0]}?" if nearest else ""
            self.error(f"unrecognized arguments: {' '.join(foreign)}{suggestion}")
        return namespace, foreign


class Command(BaseOptimumCLICommand):
    """A subcommand: `work` is what it does; a mistake of the user ends it in one line."""

    parser: argparse.ArgumentParser
    args: argparse.Namespace

    @staticmethod
    def work(args: argparse.Namespace) -> None:
        """Do what was asked; torch comes with it, not before."""
        raise NotImplementedError

    def run(self) -> None:
        """Do what was asked; a mistake ends in exit code 2, an upload that fails in code 1."""
        _warn_plainly()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # the name of a file may have what the terminal has not
        try:
            _speak_once()
            self.work(self.args)
            sys.stdout.flush()
        except BrokenPipeError:
            # whoever read has enough (`| head`); at exit, Python would try to write the rest
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.parser.exit(CLOSED)
        except PublishError as error:
            self.parser.exit(1, f"{self.parser.prog}: error: {printable(' '.join(str(error).split()))}\n")
        except PruningError as error:
            self.parser.error(str(error))
        except KeyboardInterrupt:
            self.parser.exit(INTERRUPTED, "\nInterrupted.\n")  # below what is left of a progress bar


def printable(text: str) -> str:
    """Escape what a stranger may have written to move the cursor or rename the window; lines stay lines."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


def _warn_plainly() -> None:
    """Show warnings as plain lines, as log messages are already, and only those that a user can act upon."""
    warnings.formatwarning = lambda message, *_: f"{message}\n"  # the line of a file says nothing in a shell
    warnings.simplefilter("ignore", FutureWarning)  # of other libraries, for those who program with them
    # transformers warns of looks at a count that the layers no longer have in common, and takes them itself
    logging.getLogger("transformers.integrations.heterogeneity").setLevel(logging.ERROR)


def _speak_once() -> None:
    """Of processes that `accelerate launch` started, let the first speak for all."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return
    from transformers.utils.logging import disable_progress_bar

    from optimum_prune import processes  # here, because it brings torch

    if not processes.join().is_main_process:
        disable_progress_bar()
        logging.disable(logging.WARNING)
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the rest of this process
