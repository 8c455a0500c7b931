"""One file of a checkpoint, from a folder or from the Hub: only that file is downloaded."""

import json
import logging
import os
import time
from pathlib import Path
from textwrap import shorten
from typing import Any

from optimum_prune.errors import CheckpointError

logger = logging.getLogger(__name__)

HUB_KWARGS = {"revision", "token", "cache_dir", "local_files_only", "subfolder", "force_download"}
"""Keywords of transformers' `from_pretrained` that say where the files are."""

PROBE_TIMEOUT = 5.0
"""Seconds until the Hub counts as out of reach."""
PROBE_AGAIN = 60.0
"""Seconds after which a Hub that was out of reach is asked again."""
_probed: dict[str, tuple[float, str | None]] = {}  # endpoint -> when it was asked, and why it did not answer


def unreachable(ask: bool = True) -> str | None:
    """Return why the Hub does not answer; None where it does, or where offline mode forbids to ask.

    One request without retries: huggingface_hub itself asks six times, over 23 seconds or more, for each file.

    Args:
        ask: False returns what is known of an earlier request, and sends none.
    """
    from huggingface_hub import HfApi, get_session, is_offline_mode  # here, because this module is imported for help
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage] - of httpx or its successor

    if is_offline_mode():
        return None
    endpoint = HfApi().endpoint
    asked, reason = _probed.get(endpoint, (-PROBE_AGAIN, ""))
    if not ask:
        return reason or None
    if reason is None or time.monotonic() < asked + PROBE_AGAIN:
        return reason
    try:
        get_session().head(endpoint, timeout=PROBE_TIMEOUT)
        reason = None
    except HTTPError as error:
        reason = f"{endpoint} does not answer: {said(error)}"
    _probed[endpoint] = time.monotonic(), reason
    return reason


def reachable(name_or_path: str | os.PathLike[str], **kwargs: Any) -> dict[str, Any]:
    """Return keywords of `from_pretrained`; where the Hub would be asked and does not answer, for the cache alone."""
    local = os.path.exists(name_or_path) or os.path.isabs(name_or_path)
    if local or kwargs.get("local_files_only") or (reason := unreachable()) is None:
        return kwargs
    logger.info("The Hub cannot be reached (%s): of %s only what is in the cache is read.", reason, name_or_path)
    return kwargs | {"local_files_only": True}


def fetch(name_or_path: str | os.PathLike[str], filename: str, **hub_kwargs: Any) -> Path | None:
    """Return where a file of a checkpoint is, downloaded where it must be; None where the checkpoint has none.

    Args:
        name_or_path: a local directory, or a Hub id.
        filename: of the file, in the checkpoint's folder.
        hub_kwargs: those of `HUB_KWARGS`; of a local directory, `subfolder` alone has a meaning.

    Raises:
        CheckpointError: there is no such directory or repository, or it cannot be reached.
    """
    name = os.fspath(name_or_path)
    if os.path.isdir(name):
        path = Path(name, hub_kwargs.get("subfolder") or "", filename)
        return path if path.is_file() else None
    if os.path.exists(name) or os.path.isabs(name):
        what = "is a file; pass the folder that it is in" if os.path.exists(name) else "does not exist"
        raise CheckpointError(f"{name} {what}.")

    from huggingface_hub import hf_hub_download  # here, because this module is imported to print help
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RemoteEntryNotFoundError

    try:
        return Path(hf_hub_download(name, filename, **reachable(name, **hub_kwargs)))
    except RemoteEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise CheckpointError(f"{name} is no folder here, and can be no Hub id (user/name).") from error
    except Exception as error:  # of the network, the server and the disk
        # One that is not in the cache either hides why it did not come from the Hub.
        reason = error.__cause__ or error if isinstance(error, LocalEntryNotFoundError) else error
        words = (isinstance(error, LocalEntryNotFoundError) and unreachable(ask=False)) or said(reason)
        message = f"{filename} of {name} (no folder of that name is here) cannot be had from the Hub: {words}."
        if hasattr(cause(reason), "response"):
            message += " A private or gated repository needs a token with access: `hf auth login`, or HF_TOKEN."
        raise CheckpointError(message) from error


def cached_commit(name: str, **hub_kwargs: Any) -> str | None:
    """Return the commit from which the config of a Hub model was downloaded; None where the cache does not tell.

    Args:
        name: a Hub id.
        hub_kwargs: those of `HUB_KWARGS` by which it was loaded just now.
    """
    from huggingface_hub import try_to_load_from_cache  # as above

    subfolder = (hub_kwargs.get("subfolder") or "").strip("/")
    where = {key: hub_kwargs.get(key) for key in ("cache_dir", "revision")}
    found = try_to_load_from_cache(name, f"{subfolder}/config.json".lstrip("/"), **where)
    if not isinstance(found, str):
        return None
    return Path(found).parents[len(Path(subfolder).parts)].name  # SNAPSHOTS/COMMIT/SUBFOLDER/config.json


def weight_files(
    name_or_path: str | os.PathLike[str], subfolder: str | None = None, variant: str | None = None
) -> list[Path]:
    """Find the safetensors files in a folder that transformers would load; none where it would load other files.

    Args:
        name_or_path: a local directory; a Hub id has no files here.
        subfolder: as for `from_pretrained`.
        variant: likewise.
    """
    folder, infix = Path(name_or_path, subfolder or ""), f".{variant}" if variant else ""
    if (file := folder / f"model{infix}.safetensors").is_file():
        return [file]
    index = folder / f"model.safetensors.index{infix}.json"
    if not index.is_file():
        return []
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged ({type(error).__name__}: {error}).") from error


def hub_shapes(name_or_path: str | os.PathLike[str], **kwargs: Any) -> dict[str, tuple[int, ...]]:
    """Read the shapes of a Hub repository's tensors from the headers of its safetensors files.

    Args:
        name_or_path: a Hub id; a local directory has none here.
        kwargs: those of `HUB_KWARGS`.

    Returns:
        By name; nothing where there are no such files, in a subfolder, or where they cannot be reached.
    """
    name = os.fspath(name_or_path)
    if os.path.exists(name) or kwargs.get("local_files_only") or kwargs.get("subfolder"):
        return {}
    from huggingface_hub import HfApi  # here, because this module is imported to print help

    try:
        found = HfApi().get_safetensors_metadata(name, revision=kwargs.get("revision"), token=kwargs.get("token"))
    except Exception as error:  # of the network and the server; what is loaded later is compared again
        logger.info("The headers of %s are not read: %s", name, said(error))
        return {}
    files = found.files_metadata.values()
    return {name: tuple(tensor.shape) for file in files for name, tensor in file.tensors.items()}


def fetch_json(name_or_path: str | os.PathLike[str], filename: str, **hub_kwargs: Any) -> dict[str, Any]:
    """Read a JSON file of a checkpoint; see `fetch`.

    Raises:
        CheckpointError: it is not there, cannot be had, or is no JSON object.
    """
    path = fetch(name_or_path, filename, **hub_kwargs)
    if path is None:
        raise CheckpointError(
            f"{name_or_path} has no {filename}, which Pruner.save_pretrained writes. Pass what it wrote."
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{filename} of {name_or_path} cannot be read: {error}.") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{filename} of {name_or_path} holds no JSON object.")
    return data


def fetch_record(name_or_path: str | os.PathLike[str], **hub_kwargs: Any) -> dict[str, Any]:
    """Read what `config.json` records of a pruning; its `recipe` is there.

    Raises:
        CheckpointError: it cannot be had, or was not pruned by this package.
    """
    record = fetch_json(name_or_path, "config.json", **hub_kwargs).get("pruning_config")
    if not isinstance(record, dict) or not isinstance(record.get("recipe"), dict):
        raise CheckpointError(
            f"{name_or_path} was not pruned by optimum_prune: its config.json has no 'pruning_config' with a recipe."
        )
    return record


def said(error: BaseException) -> str:
    """Word what went wrong on the way to the Hub, in one line: the server's status and words, if it had any."""
    error = cause(error) or error
    response = getattr(error, "response", None)
    if response is not None:
        told = getattr(error, "server_message", None)
        words = f"{response.status_code} {response.reason_phrase}" + (f": {told}" if told else "")
    else:
        words = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
    return shorten(words, width=300).rstrip(".") or type(error).__name__


def cause(error: BaseException) -> BaseException | None:
    """Return the server's refusal or the network's failure that an error came from; None where it is neither."""
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage] - of httpx or its successor

    link: BaseException | None = error
    while link is not None and not isinstance(link, HTTPError):
        link = link.__cause__
    return link
