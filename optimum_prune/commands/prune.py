"""The command `optimum-cli prune`: its flags are the fields of the configurations; torch comes with `run`."""

import argparse
import logging
import tempfile
import typing
import warnings
from dataclasses import Field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

# not from `optimum.commands`, a namespace without names: the import would break every command of optimum-cli
from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from optimum_prune import registry
from optimum_prune.config import CalibrationConfig, PruningConfig, read_recipe
from optimum_prune.errors import InvalidConfig, PruningError
from optimum_prune.measurements import check_evaluation

CALIBRATION = "calibration_"  # prefix of the flags that are fields of CalibrationConfig
LOADING = ("dtype", "device_map", "gguf_file")  # flags that go to transformers' from_pretrained
INTERRUPTED = 130  # what shells report of a program that ended by Ctrl-C


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaint about a user's mistake is one line, without the page of usage before it."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown flags with the nearest one; the root parser would refuse them with its own usage."""
        namespace, foreign = super().parse_known_args(args, namespace)
        if foreign:
            flags = [flag for action in self._actions for flag in action.option_strings]
            nearest = get_close_matches(foreign[0].partition("=")[0], flags, n=1)
            suggestion = f". Did you mean {nearest[0]}?" if nearest else ""
            self.error(f"unrecognized arguments: {' '.join(foreign)}{suggestion}")
        return namespace, foreign


class RunCommand(BaseOptimumCLICommand):
    """`optimum-cli prune run`: load, prune, evaluate if asked, save."""

    COMMAND = CommandInfo("run", help="Prune a model and save it.")
    parser: argparse.ArgumentParser
    args: argparse.Namespace

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        """Declare the flags."""
        parser.allow_abbrev = False  # a script's `--s` must not change its meaning when a field is added
        parser.epilog = (
            f"Architectures: {', '.join(registry.available('adapters'))}. "
            f"Scorers: {', '.join(registry.available('scorers'))}."
        )
        add = parser.add_argument
        add("--model", required=True, help="model id on the Hub, or a local folder")
        add("--output", required=True, type=Path, metavar="DIR", help="folder to save to")
        add("--recipe", type=Path, metavar="FILE", help="YAML or JSON recipe; flags override its values")
        add(
            "--layout",
            choices=("auto", "stock", "compact"),
            default="auto",
            help="how the model is written: 'stock' loads without this package and needs equal widths in "
            "every layer, 'compact' takes any; 'auto' chooses (default)",
        )
        add("--evaluate", metavar="SOURCE", help="measure on this data; the same kinds as calibration's")
        add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="dtype to load in")
        add("--device-map", metavar="MAP", help="where to load to, e.g. 'auto', 'cpu' or 'cuda'")
        add("--gguf-file", metavar="FILE", help="GGUF file inside the model's folder or repository")
        _add_fields(parser.add_argument_group("pruning"), PruningConfig)
        _add_fields(parser.add_argument_group("calibration"), CalibrationConfig, prefix=CALIBRATION)

    def run(self) -> None:
        """Do what was asked; a user's mistake ends in one line and exit code 2."""
        _warn_plainly()
        try:
            _run(self.args)
        except PruningError as error:
            self.parser.error(str(error))
        except KeyboardInterrupt:
            self.parser.exit(INTERRUPTED, "\nInterrupted.\n")  # below what is left of a progress bar


class PruneCommand(BaseOptimumCLICommand):
    """`optimum-cli prune`: prints help; the work is in its subcommands."""

    COMMAND = CommandInfo("prune", help="Prune transformers models.")
    SUBCOMMANDS = (CommandInfo("run", help=RunCommand.COMMAND.help, subcommand_class=RunCommand),)

    @BaseOptimumCLICommand.subparsers.getter
    def subparsers(self) -> Any:
        """Parse subcommands with our own parser."""
        if not hasattr(self, "_subparsers"):
            self._subparsers = self.parser.add_subparsers(parser_class=OneLineParser)
        return self._subparsers


def _run(args: argparse.Namespace) -> None:
    config = _config(args)
    _check_output(args.output, args.model)
    if args.evaluate is not None:
        check_evaluation(args.evaluate)

    from optimum_prune.calibration.sources import open_source
    from optimum_prune.pruner import Pruner  # here, because it brings torch

    scorer = registry.load("scorers", config.scorer)
    if (
        args.layout == "stock"
        and (scorer.allocation if config.allocation == "auto" else config.allocation) != "uniform"
    ):
        raise InvalidConfig("--layout stock needs layers of equal size: add --allocation uniform.")
    for source in (config.calibration.source, args.evaluate):
        if source not in (None, "self"):  # refuse what cannot be read before hours of work, not after
            open_source(replace(config.calibration, source=source))
    loading = {name: value for name in LOADING if (value := getattr(args, name)) is not None}
    pruner = Pruner.from_pretrained(args.model, **loading)
    print(pruner.prune(config))
    if args.evaluate is not None:
        pruner.evaluate(args.evaluate)
        print(pruner.comparison())
    pruner.save_pretrained(args.output, layout=args.layout)
    print(f"Saved to {args.output}")


def _warn_plainly() -> None:
    """Show warnings as plain lines, as log messages are already, and only those that a user can act upon."""
    warnings.formatwarning = lambda message, *_: f"{message}\n"  # the line of a file says nothing in a shell
    warnings.simplefilter("ignore", FutureWarning)  # of other libraries, for those who program with them
    # transformers warns of looks at a count that the layers no longer have in common, and takes them itself
    logging.getLogger("transformers.integrations.heterogeneity").setLevel(logging.ERROR)


def _add_fields(group: Any, config: type, prefix: str = "") -> None:
    for option in fields(config):
        if option.name != "calibration":  # its fields are flags of their own
            default = "" if option.default is None else f" (default: {option.default})"
            group.add_argument(
                f"--{prefix}{option.name}".replace("_", "-"),
                default=argparse.SUPPRESS,  # a flag that is not given leaves the recipe's value alone
                help=f"{option.metadata['help']}{default}".replace("%", "%%"),
                **_value(option),
            )


def _value(option: Field) -> dict[str, Any]:
    """Translate a field's type into what argparse calls it."""
    kinds = typing.get_args(option.type) or (option.type,)
    if list[str] in kinds:
        return {"nargs": "+", "metavar": "NAME"}
    if float in kinds:
        return {"type": float if option.default is None else _number_or_word, "metavar": "X"}
    if int in kinds:
        return {"type": int, "metavar": "N"}
    return {"metavar": "NAME"}


def _number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _config(args: argparse.Namespace) -> PruningConfig:
    """Merge the recipe and the flags, then check the result: a recipe may leave what a flag gives."""
    recipe = read_recipe(args.recipe) if args.recipe else {}
    calibration = CalibrationConfig.from_dict(recipe.get("calibration", {}))
    calibration = replace(calibration, **_given(args, CalibrationConfig, CALIBRATION))
    return PruningConfig.from_dict({**recipe, **_given(args, PruningConfig), "calibration": calibration})


def _given(args: argparse.Namespace, config: type, prefix: str = "") -> dict[str, Any]:
    flags = {option.name: f"{prefix}{option.name}" for option in fields(config)}
    return {name: getattr(args, flag) for name, flag in flags.items() if hasattr(args, flag)}


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
