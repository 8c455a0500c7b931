"""Where the commands write to: what must not be replaced, or cannot."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from optimum_prune.commands.flags import card_options
from optimum_prune.errors import InvalidConfig


def check_output(output: Path, model: str) -> None:
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


def check_json(path: Path) -> None:
    """Refuse a JSON file that cannot be written, before the work whose result it is to hold.

    Raises:
        InvalidConfig: naming the file and the reason.
    """
    try:
        if path.is_dir():
            raise InvalidConfig(f"--json {str(path)!r} is a folder; choose a file.")
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise InvalidConfig(f"--json {str(path)!r} cannot be written: {error.strerror}.") from error


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file.

    Raises:
        InvalidConfig: it cannot be written.
    """
    try:
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"--json {str(path)!r} cannot be written: {error.strerror}.") from error


def save(pruner: Any, args: argparse.Namespace) -> None:
    """Save as the flags say, and say where and how.

    Args:
        pruner: holds the model.
        args: of a command with `--output`, and the flags of `add_layout`, `add_storage` and `add_card`.
    """
    how: dict[str, Any] = {"layout": args.layout, "storage": args.storage, "class_switch": args.class_switch}
    how |= card_options(args)
    print(f"Saved to {args.output} ({pruner.save_pretrained(args.output, **how)})")
