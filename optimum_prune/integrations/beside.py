"""Small files beside the weights of a model's source, which go along when the model is saved.

Licences, tokenizer files, modelling code, settings of other libraries, pictures: no list of names could be complete, so
the rule is what does *not* go along. It is applied to each entry at the top of the source, a file or a whole folder:

- weights, and folders that hold weights: they are those of another model;
- what is larger than `LIMIT`, or a folder of more than `MOST` files;
- links that lead out of the source;
- hidden files, and what a training or an earlier pruning left for itself.

Files that the save itself writes, or that are in the output folder already, are never replaced.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from transformers import PreTrainedModel

from optimum_prune.errors import CheckpointError
from optimum_prune.fetching import fetch, said
from optimum_prune.integrations.layouts import PICTURES, STALE
from optimum_prune.integrations.loading import REPORT
from optimum_prune.recovery.adapter import CONFIG, FOLDER

logger = logging.getLogger(__name__)

LIMIT = 64 * 2**20
"""Bytes of the largest file or folder that goes along; tokenizers of large vocabularies have 35 MB."""
MOST = 200
"""Number of files in the largest folder that goes along."""
TIMEOUT = 5.0
"""Seconds that the Hub is given to list the files of a repository."""
WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|ggml|onnx|onnx_data|ot|tflite|npz|npy|pkl|pickle|nemo|mlmodel"
    r"|pdparams|engine|tar)|.*\.index\.json|" + re.escape(CONFIG)
)
"""Names of files with weights, their indexes, and the settings without which an adapter's weights mean nothing."""
STATE = re.compile(
    r"trainer_state\.json|training_args\.bin|(all|train|eval|test|predict)_results\.json|rng_state.*\.pth"
    r"|(optimizer|scheduler|scaler)\.(pt|bin)|events\.out\.tfevents.*|checkpoint-\d+|__pycache__"
)
"""Names of files and folders in which transformers' Trainer keeps its state; the numbers are those of other weights."""
OWN = re.compile(rf"README\.md|{re.escape(REPORT)}|{PICTURES}|{STALE.pattern}")
"""Names of what belongs to the source alone: its card, the report of its pruning, its weights."""


@dataclass(frozen=True)
class Origin:
    """Where a model was loaded from.

    Attributes:
        name_or_path: a local folder or a Hub id; empty where nobody knows.
        hub_kwargs: those of `HUB_KWARGS` by which it was loaded.
    """

    name_or_path: str
    hub_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: PreTrainedModel, **hub_kwargs: Any) -> "Origin":
        """Read off a model where it came from; its commit counts more than the name of a branch."""
        commit = getattr(model.config, "_commit_hash", None)
        return cls(str(model.config.name_or_path or ""), hub_kwargs | ({"revision": commit} if commit else {}))

    @property
    def folder(self) -> Path | None:
        """The local folder, if it is one."""
        if not os.path.isdir(self.name_or_path):
            return None
        return Path(self.name_or_path, self.hub_kwargs.get("subfolder") or "")


Entry = tuple[str, list[str], str]
"""Name at the top of the source; the files of it that go along; and, where there are none, the reason."""
Get = Callable[[str], Path | None]
"""Name of a file of the source -> where it is, downloaded where it must be."""


def copy_beside(origin: Origin, new: Path, target: Path) -> dict[str, str]:
    """Copy the small files of a model's source.

    Nothing that fails here is worth a save: it is named in what is returned.

    Args:
        origin: the source.
        new: folder of the checkpoint that is being written, with all that the save itself writes.
        target: folder that `new` will replace, whose other files will be carried over.

    Returns:
        Name of a file or folder of the source that stays behind -> the reason.
    """
    source = origin.folder
    if source is not None and target.exists() and source.samefile(target):
        return {}  # all of it is carried over
    entries, get = _of_the_hub(origin) if source is None else _of_folder(source, without=target)
    stay: dict[str, str] = {}
    for top, names, reason in entries:
        if reason:
            stay[top] = reason
        for name in names:
            if reason := _copy(name, get, new, target):
                stay[name] = reason
    return stay


def _copy(name: str, get: Get, new: Path, target: Path) -> str:
    """Copy a file unless there is one; return why it stays behind, if it does."""
    if _is_taken(new, name):
        return ""  # the save itself wrote it
    try:
        found: Path | None = get(name)
        if found is None:
            return "it is gone"
        if _is_taken(target, name):
            same = (target / name).is_file() and (target / name).read_bytes() == found.read_bytes()
            return "" if same else "the output folder has its own"
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found, new / name)
    except CheckpointError as error:
        return str(error)
    except (PermissionError, FileNotFoundError) as error:
        return f"it cannot be read ({error.strerror})"
    return ""


def _is_taken(folder: Path, name: str) -> bool:
    """Tell whether a name is there already, or a file or link is where it needs a folder."""
    above = [folder / parent for parent in PurePosixPath(name).parents][:-1]
    return os.path.lexists(folder / name) or any(
        path.is_symlink() or (path.exists() and not path.is_dir()) for path in above
    )


def _of_folder(source: Path, without: Path | None = None) -> tuple[list[Entry], Get]:
    """Judge the entries of a folder, except one that holds, or is, the folder that is written to."""
    root = source.resolve()
    inside = [root]
    if root.parent.name == "snapshots":  # of the Hub's cache, whose files are links
        inside.append(root.parents[1] / "blobs")
    entries = []
    for top in sorted(source.iterdir()):
        if without is not None and without.resolve().is_relative_to(root / top.name):
            continue
        files = _walk(top, source, inside)
        if not _is_skipped(top.name) and not (top.name == FOLDER and (top / CONFIG).is_file()):
            entries.append((top.name, *_judge(files)))
    return entries, lambda name: source / name


def _walk(top: Path, source: Path, inside: Iterable[Path]) -> Iterator[tuple[str, int | None]]:
    """Yield name and size of every file of an entry; a link that leads out, or to a folder, has no size."""
    if top.is_dir() and not top.is_symlink():
        for path in sorted(top.iterdir()):
            if not _is_skipped(path.name, nested=True):
                yield from _walk(path, source, inside)
        return
    name = top.relative_to(source).as_posix()
    if top.is_symlink():
        leads = top.resolve()
        if not any(leads.is_relative_to(folder) for folder in inside) or leads.is_dir():
            yield name, None
            return
    if top.is_file():
        yield name, top.stat().st_size


def _of_the_hub(origin: Origin) -> tuple[list[Entry], Get]:
    """Judge the entries of a repository, or of what the cache has of it; say how to get a file."""
    name = origin.name_or_path
    if not name or os.path.isabs(name) or os.path.exists(name):
        return [], lambda path: None
    where = {key: value for key, value in origin.hub_kwargs.items() if key != "force_download"}
    below = f"{where['subfolder'].strip('/')}/" if where.get("subfolder") else ""
    try:
        if where.get("local_files_only"):
            raise CheckpointError("local_files_only=True")
        info = HfApi(token=where.get("token")).model_info(
            name, revision=where.get("revision"), files_metadata=True, timeout=TIMEOUT
        )
    except Exception as error:  # of the network and the server
        return _of_the_cache(origin, below, error)
    found = {file.rfilename: file.size or 0 for file in info.siblings or () if file.rfilename.startswith(below)}
    sizes = sorted((path.removeprefix(below), size) for path, size in found.items())
    entries = []
    for top, files in groupby(sizes, key=lambda file: file[0].partition("/")[0]):
        if not _is_skipped(top) and not (top == FOLDER and f"{below}{FOLDER}/{CONFIG}" in found):
            entries.append((top, *_judge(file for file in files if not _has_skipped(file[0]))))
    return entries, lambda path: fetch(name, path, **where | {"revision": info.sha})


def _of_the_cache(origin: Origin, below: str, error: Exception) -> tuple[list[Entry], Get]:
    name, where = origin.name_or_path, origin.hub_kwargs
    known = not isinstance(error, HFValidationError | RepositoryNotFoundError)  # else it is a path of long ago
    logger.log(
        logging.WARNING if known else logging.INFO,
        "The files of %s cannot be listed (%s). Of those beside the weights, such as a licence, only what is in the "
        "cache goes along.",
        name,
        said(error),
    )
    cached = (
        try_to_load_from_cache(
            name, f"{below}config.json", cache_dir=where.get("cache_dir"), revision=where.get("revision")
        )
        if known
        else None
    )
    if not isinstance(cached, str):
        return [], lambda path: None
    return _of_folder(Path(cached).parent)


def _is_skipped(name: str, nested: bool = False) -> bool:
    """Tell what neither goes along nor is named; `README.md` and the like are skipped at the top alone."""
    return name.startswith(".") or bool(STATE.fullmatch(name)) or (not nested and bool(OWN.fullmatch(name)))


def _has_skipped(name: str) -> bool:
    return any(_is_skipped(part, nested=True) for part in name.split("/")[1:])


def _judge(files: Iterable[tuple[str, int | None]]) -> tuple[list[str], str]:
    """Return the names of the files, or none of them and the reason why the entry stays behind."""
    names, total = [], 0
    for name, size in files:
        if size is None:
            return [], "a link"
        if WEIGHTS.fullmatch(name.rpartition("/")[2]):
            return [], "weights"
        names.append(name)
        total += size
        if total > LIMIT:
            return [], f"more than {LIMIT // 2**20} MiB"
        if len(names) > MOST:
            return [], f"more than {MOST} files"
    return names, ""
