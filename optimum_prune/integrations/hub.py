"""Publish a checkpoint on the Hub: ask first, send everything in one commit, and say what to do where that fails."""

import json
import logging
import shlex
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import get_session, validate_repo_id

from optimum_prune.config import without_paths
from optimum_prune.errors import CheckpointError, InvalidConfig, PublishError
from optimum_prune.fetching import cause, fetch, fetch_json, said
from optimum_prune.integrations.layouts import PICTURES, STALE
from optimum_prune.integrations.loading import REPORT
from optimum_prune.integrations.metadata import given_metadata, with_metadata
from optimum_prune.integrations.signature import is_ours, spare_name
from optimum_prune.processes import is_main
from optimum_prune.recovery.adapter import CONFIG, FOLDER
from optimum_prune.report import is_hub_id

logger = logging.getLogger(__name__)

PATIENCE = 120.0
"""Seconds that the Hub is given for each answer. Left alone, huggingface_hub waits for ever."""
ADVICE = {
    401: "Log in by `hf auth login`, or set HF_TOKEN to a token that is valid.",
    403: "The token must have the right to write there: see https://huggingface.co/settings/tokens, choose a namespace "
    "of yours, or propose the model to its owner by a pull request (create_pr).",
    404: "Check the name of the repository and the branch, and that the token may see them.",
    409: "Somebody else changes the repository at this moment; try again.",
    413: "A file is larger than the server takes; save with a smaller max_shard_size.",
    429: "Wait some minutes, then try again.",
}
"""Status of the server's answer -> what to do."""
TROUBLE = "The Hub is in trouble (https://status.huggingface.co); try again later."
NO_ANSWER = "Check the network (a proxy, a firewall, HF_ENDPOINT), then try again."


@dataclass(frozen=True)
class Destination:
    """Where on the Hub a checkpoint goes, and how.

    Attributes:
        repo_id: `user/name`, or `name` for a repository of one's own.
        private: whether only its owners see the repository; None: a new one is what its owner's settings say.
        revision: branch to write to; by default `main`.
        create_pr: propose the files by a pull request.
        commit_message: first line of the commit, and title of the pull request.
        token: by default that of `hf auth login` or `HF_TOKEN`.
        base_model: Hub id of the dense model, for the card that is sent; None leaves what the card says.
        license: the same of the licence.
    """

    repo_id: str
    private: bool | None = None
    revision: str | None = None
    create_pr: bool = False
    commit_message: str | None = None
    token: str | None = field(default=None, repr=False)
    base_model: str | None = None
    license: str | None = None


def prepare(to: Destination) -> Destination:
    """Create the repository and branch where they do not exist, and make sure that the token may write there.

    Of processes that train together, the main one does; so it is with `upload`.

    Returns:
        The destination with the repository's full id.

    Raises:
        InvalidConfig: an impossible id or metadata, settings that exclude each other, no token, or the repository
            exists and is not as private as asked.
        PublishError: the Hub refused, or did not answer.
    """
    try:
        validate_repo_id(to.repo_id)
    except HFValidationError as error:
        raise InvalidConfig(f"{to.repo_id!r} cannot be a repository's id; give user/name. {error}") from error
    given_metadata(to.base_model, to.license)
    if to.create_pr and to.revision is not None:
        raise InvalidConfig(f"A pull request is made to main; leave out revision={to.revision!r} or create_pr.")
    if (to.token or get_token()) is None:
        raise InvalidConfig("Publishing needs a token of the Hub: log in by `hf auth login`, or set HF_TOKEN.")
    if not is_main():
        return to
    api = HfApi(token=to.token)
    with _asking(f"Creating {to.repo_id}"):
        to = replace(to, repo_id=api.create_repo(to.repo_id, private=to.private, exist_ok=True).repo_id)
    if to.private is not None:
        _check_private(api, to.repo_id, to.private)
    if to.revision is not None and not to.revision.startswith("refs/"):
        with _asking(f"Creating branch {to.revision!r} of {to.repo_id}"):
            api.create_branch(to.repo_id, branch=to.revision, exist_ok=True)
    with _asking(f"Writing to {to.repo_id}"):
        # What is asked of the server before any upload: it needs the right to write, and writes nothing.
        trial = [CommitOperationAdd("README.md", b"trial")]
        api.preupload_lfs_files(to.repo_id, trial, revision=to.revision, create_pr=to.create_pr)
    return to


def upload(directory: str | Path, to: Destination) -> str:
    """Send a saved checkpoint in one commit, which also takes away the weights and report of an older one.

    A `README.md` on the Hub that this package did not write, or that somebody edited, is kept under another name.
    Hidden files stay here; so do the paths of this machine that the report names.

    Args:
        directory: of the checkpoint.
        to: what `prepare` returned.

    Returns:
        The address of the repository, branch or pull request.

    Raises:
        PublishError: the Hub refused, or did not answer; the directory is as it was.
    """
    directory, api = Path(directory), HfApi(token=to.token)
    branch = f"/tree/{to.revision}" if to.revision else ""
    address = f"{api.endpoint}/{to.repo_id}{branch}"
    if not is_main():
        return address
    sent = _files(directory)
    contents = {name: _published(name, path, to) for name, path in sent.items()}
    then = f" The checkpoint is whole in {directory}. To try again: `{_command(directory, to)}`"
    with _asking(f"Uploading to {to.repo_id}", then):
        listed = api.list_repo_files(to.repo_id, revision=to.revision)
        card = _read(to, "README.md") if "README.md" in listed else None
        if card is not None and "README.md" in sent:
            contents |= _kept_words(to, contents, listed, card)
        commit = api.create_commit(
            to.repo_id,
            [
                *(CommitOperationAdd(name, content) for name, content in contents.items()),
                *(CommitOperationDelete(name) for name in _stale(sent, listed, card)),
            ],
            commit_message=to.commit_message or "Upload a model pruned by optimum_prune",
            revision=to.revision,
            create_pr=to.create_pr,
        )
    return commit.pr_url or address


def check_directory(directory: str | Path, to: Destination) -> None:
    """Refuse to publish what holds no checkpoint, or no card for the metadata that was given.

    Raises:
        CheckpointError: it is no folder, or has no `config.json` that can be read, or no `README.md`.
    """
    if not Path(directory).is_dir():
        raise CheckpointError(f"{directory} is no folder; pass one that Pruner.save_pretrained wrote.")
    fetch_json(directory, "config.json")
    if given_metadata(to.base_model, to.license) and not Path(directory, "README.md").is_file():
        raise CheckpointError(f"{directory} has no README.md into which base_model and license could go.")


@contextmanager
def _asking(what: str, then: str = "") -> Iterator[None]:
    """Limit the time of every request, and turn all that can go wrong into one error.

    Args:
        what: is tried, as the beginning of a sentence.
        then: what else to say to the user.
    """
    session = get_session()
    hooks = session.event_hooks
    session.event_hooks = {**hooks, "request": [*hooks["request"], _limit]}
    try:
        yield
    except KeyboardInterrupt:
        logger.warning("%s was interrupted.%s", what, then)
        raise
    except Exception as error:  # of the network, the server, huggingface_hub and its storage
        raise PublishError(f"{what} failed: {said(error)}.{_advice(cause(error))}{then}") from error
    finally:
        session.event_hooks = hooks


def _limit(request: Any) -> None:
    """Limit the time of a request; here, because many calls of huggingface_hub ask for no limit in so many words."""
    limits = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {
        kind: limits.get(kind) or PATIENCE for kind in ("connect", "read", "write", "pool")
    }


def _advice(error: BaseException | None) -> str:
    """Return what to do about a refusal or a failure of the network, after a space; nothing where it was neither."""
    response = getattr(error, "response", None)
    if response is None:
        return "" if error is None else f" {NO_ANSWER}"
    advice = ADVICE.get(response.status_code, TROUBLE if response.status_code >= 500 else "")
    return advice and f" {advice}"


def _check_private(api: HfApi, repo_id: str, private: bool) -> None:
    with _asking(f"Looking at {repo_id}"):
        found = bool(api.model_info(repo_id).private)
    if found != private:
        is_now, wanted = ("private", "public") if found else ("public", "private")
        raise InvalidConfig(
            f"{repo_id} exists and is {is_now}, which an upload does not change. Make it {wanted} in its settings, or "
            "choose another name."
        )


def _files(directory: Path) -> dict[str, Path]:
    """Return name in the repository -> file, of all that are not hidden nor in a hidden folder."""
    files = {path.relative_to(directory): path for path in sorted(directory.rglob("*")) if path.is_file()}
    return {
        name.as_posix(): path for name, path in files.items() if not any(part.startswith(".") for part in name.parts)
    }


def save_and_upload(save: Callable[[Path], Any], to: Destination, directory: str | Path | None = None) -> str:
    """Save a checkpoint and upload it.

    Args:
        save: writes it into a folder.
        to: as from `prepare`.
        directory: where to save, and keep, it; by default a temporary folder, which stays only where the upload fails.

    Returns:
        As `upload`.

    Raises:
        PublishError: as `upload`.
    """
    folder = Path(directory or tempfile.mkdtemp(prefix="optimum-prune-"))
    try:
        save(folder)
    except BaseException:
        if directory is None:
            shutil.rmtree(folder)
        raise
    url = upload(folder, to)
    if directory is None:
        shutil.rmtree(folder)  # not before: it is all that there is where the upload fails
    return url


def _stale(sent: Collection[str], listed: Collection[str], card: bytes | None) -> list[str]:
    """Return what would stay in the repository and speak of an older checkpoint, its card included."""
    left = [name for name in listed if name not in sent]
    folders = (f"{PICTURES}/", f"{FOLDER}/") if f"{FOLDER}/{CONFIG}" in listed else (f"{PICTURES}/",)
    stale = [name for name in left if STALE.fullmatch(name) or name.startswith(folders)]
    return [*stale, "README.md"] if "README.md" in left and card is not None and is_ours(card) else stale


def _kept_words(to: Destination, sent: Mapping[str, Any], listed: list[str], card: bytes) -> dict[str, bytes]:
    """Return name -> content of somebody's `README.md` that would be replaced."""

    def read(name: str) -> bytes | None:
        content = sent.get(name) or (_read(to, name) if name in listed else None)
        return content.read_bytes() if isinstance(content, Path) else content

    if (name := spare_name(card, read)) is None:
        return {}
    logger.warning("README.md of %s was not written by this package, or edited since: kept as %s.", to.repo_id, name)
    return {name: card}


def _read(to: Destination, name: str) -> bytes | None:
    path = fetch(to.repo_id, name, revision=to.revision, token=to.token)
    return None if path is None else path.read_bytes()


def published(report: dict[str, Any]) -> dict[str, Any]:
    """Return what a report's file says to others: no path of this machine, nor one as the name of the base model."""
    named = is_hub_id(report.get("base_model") or "")
    return without_paths(report if named else report | {"base_model": None})


def _published(name: str, path: Path, to: Destination) -> bytes | Path:
    """Return what is sent of a file: the file; of the report and the card, what others may and shall read."""
    given = given_metadata(to.base_model, to.license)
    if name == "README.md" and given:
        return with_metadata(path.read_text(encoding="utf-8"), given).encode()
    if path.name != REPORT:
        return path
    return json.dumps(published(json.loads(path.read_text(encoding="utf-8")))).encode() + b"\n"


def _command(directory: Path, to: Destination) -> str:
    """Return the shell command that uploads once more; the token is that of the shell."""
    words = ["optimum-cli", "prune", "push", str(directory), to.repo_id]
    words += ["--private"] if to.private else []
    words += ["--create-pr"] if to.create_pr else []
    for name in ("revision", "commit_message", "base_model", "license"):
        words += [f"--{name.replace('_', '-')}", value] if (value := getattr(to, name)) else []
    return shlex.join(words)
