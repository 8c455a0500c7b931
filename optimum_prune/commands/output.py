"""Where the commands write to: what must not be replaced, or cannot."""

import tempfile
from pathlib import Path

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
