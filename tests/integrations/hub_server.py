"""A Hub on this machine: the requests of huggingface_hub that creating, writing and reading a model need, and faults.

Tokens are names of users; each may write to repositories under their own name. Large files are kept on disk.
"""

import hashlib
import json
import re
import shutil
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

Files = dict[str, bytes | Path]
MAIN = "main"


@dataclass
class Repository:
    """Branches and pull requests are names of commits; a commit holds all files."""

    private: bool
    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: Files, message: str) -> str:
        sha = hashlib.sha1(f"{branch} {len(self.commits)}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        self.messages.append(message)
        return sha

    def files(self, revision: str = MAIN) -> Files:
        return self.commits[self.branches.get(revision, revision)]

    def knows(self, revision: str) -> bool:
        return revision in self.branches or revision in self.commits


@dataclass
class Fault:
    """What happens to requests whose method and path match: a status, `"close"` or `"hang"`."""

    request: str
    what: int | str
    message: str = "no luck today"


class Hub(ThreadingHTTPServer):
    """Use as a context; `url` is the endpoint."""

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, Repository] = {}
        self.faults: list[Fault] = []
        self.log: list[str] = []
        self.ended = threading.Event()

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: Any) -> None:
        """Stay silent: a client that gave up is part of the tests."""

    def create(self, name: str, files: dict[str, bytes] | None = None, private: bool = False) -> Repository:
        """Make a repository as the Hub does, with a first commit."""
        repository = self.repositories[name] = Repository(private)
        repository.commit(MAIN, {".gitattributes": b"", **(files or {})}, "initial commit")
        return repository


@contextmanager
def loopback(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Run a Hub to which this process and its children turn, as user `me` with an empty cache; nobody waits."""
    with Hub(folder) as hub:
        urls = {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        }
        settings = {"HF_HUB_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
        for name, value in {**urls, **settings}.items():
            patch.setattr(f"huggingface_hub.constants.{name}", value)
        patch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # keeps the address of an earlier Hub
        patch.setenv("HF_TOKEN", "me")
        patch.setattr("time.sleep", lambda seconds: None)
        yield hub


def contents(folder: Path) -> dict[str, bytes]:
    """Return name -> content of all files in a folder, by their names in a repository."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def elsewhere(hub: Hub) -> str:
    """Return the first line of a script for a fresh process that turns to that Hub, as user `me`."""
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(hub.folder / "home"), "HF_TOKEN": "me"}
    return f"import os; os.environ.update({settings | {'HF_HUB_DISABLE_XET': '1', 'HF_HUB_OFFLINE': '0'}})\n"


class Refused(Exception):
    def __init__(self, status: int, message: str, code: str = "", **more: str):
        super().__init__(message)
        self.status, self.code, self.more = status, code, more


class Handler(BaseHTTPRequestHandler):
    """Looks up `ROUTES`; whatever a route returns is sent as JSON."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        self.query = parse_qs(split.query)
        request = f"{self.command} {self.path}"
        self.server.log.append(request)
        try:
            for fault in self.server.faults:
                if re.search(fault.request, request):
                    return self._fail(fault)
            for route, function in ROUTES.items():
                if found := re.fullmatch(route, f"{self.command} {split.path}"):
                    return self._send(
                        function(self, **{key: value and unquote(value) for key, value in found.groupdict().items()})
                    )
            raise Refused(404, "there is nothing of that name", "EntryNotFound")
        except Refused as refused:
            headers = {"X-Error-Code": refused.code}
            if self.command in ("POST", "PUT"):
                headers["Connection"] = "close"  # the body may be unread, and would be taken for the next request
            self._send({"error": str(refused), **refused.more}, refused.status, headers)

    do_HEAD = do_POST = do_PUT = do_GET

    @property
    def user(self) -> str:
        return self.headers.get("authorization", "").removeprefix("Bearer ")

    def may_write(self, name: str) -> None:
        if self.user == "nobody":
            raise Refused(401, "Invalid username or password.")
        if name.partition("/")[0] != self.user and not self.query.get("create_pr"):
            raise Refused(403, f"You don't have the rights to write to {name}")

    def repository(self, name: str, revision: str | None = None) -> Repository:
        found = self.server.repositories.get(name)
        if found is None or (found.private and name.partition("/")[0] != self.user):
            raise Refused(404, "Repository not found", "RepoNotFound")
        if revision is not None and not found.knows(revision):
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found

    def json(self) -> Any:
        return json.loads(b"".join(self.body()))

    def body(self) -> Iterator[bytes]:
        """Yield what was sent, whole or in chunks, once."""
        sizes = iter(lambda: int(self.rfile.readline() or b"0", 16), 0) if self._is_chunked else [self._length]
        for size in sizes:
            while size:
                size -= len(part := self.rfile.read(min(size, 1 << 20)))
                yield part
            if self._is_chunked:
                self.rfile.readline()
        if self._is_chunked:
            self.rfile.readline()

    @property
    def _length(self) -> int:
        return int(self.headers.get("content-length", 0))

    @property
    def _is_chunked(self) -> bool:
        return self.headers.get("transfer-encoding") == "chunked"

    def _fail(self, fault: Fault) -> None:
        self.close_connection = True
        if isinstance(fault.what, int):
            self._send({"error": fault.message}, fault.what, {"Connection": "close"})
        elif fault.what == "hang":
            self.server.ended.wait(60)

    def _send(self, answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        if isinstance(answer, tuple):
            answer, headers = answer
        body = answer if isinstance(answer, bytes | Path) else json.dumps(answer).encode()
        size = body.stat().st_size if isinstance(body, Path) else len(body)
        self.send_response(status)
        for key, value in {"Content-Length": str(size), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if isinstance(body, Path):
            with body.open("rb") as file:
                shutil.copyfileobj(file, self.wfile)
        else:
            self.wfile.write(body)


def create(handler: Handler) -> Any:
    asked = handler.json()
    name = f"{asked.get('organization') or handler.user}/{asked['name']}"
    url = f"{handler.server.url}/{name}"
    handler.may_write(name)
    if name in handler.server.repositories:
        raise Refused(409, "You already created this model repo", url=url)
    handler.server.create(name, private=asked.get("visibility") == "private" or bool(asked.get("private")))
    return {"url": url, "name": name, "id": "0"}


def create_branch(handler: Handler, name: str, branch: str) -> Any:
    handler.json()
    handler.may_write(name)
    repository = handler.repository(name)
    if branch in repository.branches:
        raise Refused(409, "Reference already exists")
    repository.branches[branch] = repository.branches[MAIN]
    return {}


def preupload(handler: Handler, name: str, revision: str) -> Any:
    asked = handler.json()
    handler.may_write(name)
    handler.repository(name, revision)
    files = [
        {"path": path, "uploadMode": "lfs" if path.endswith(".safetensors") else "regular", "shouldIgnore": False}
        for path in (file["path"] for file in asked["files"])
    ]
    return {"files": files}


def large_files(handler: Handler, name: str) -> Any:
    objects = handler.json()["objects"]
    for one in objects:
        if not (handler.server.folder / one["oid"]).exists():
            one["actions"] = {"upload": {"href": f"{handler.server.url}/storage/{one['oid']}"}}
    return {"transfer": "basic", "objects": objects}


def store(handler: Handler, oid: str) -> Any:
    partial, digest = handler.server.folder / f"{oid}.{threading.get_ident()}", hashlib.sha256()
    with partial.open("wb") as file:
        for part in handler.body():
            digest.update(part)
            file.write(part)
    if digest.hexdigest() != oid:
        raise Refused(400, "The content is not what it is called")
    partial.rename(handler.server.folder / oid)
    return {}


def commit(handler: Handler, name: str, revision: str) -> Any:
    lines = [json.loads(line) for line in b"".join(handler.body()).splitlines()]
    handler.may_write(name)
    repository = handler.repository(name, revision)
    files, message = dict(repository.files(revision)), ""
    for key, value in ((line["key"], line["value"]) for line in lines):
        if key == "header":
            message = value["summary"]
        elif key == "file":
            files[value["path"]] = b64decode(value["content"])
        elif key == "lfsFile":
            files[value["path"]] = handler.server.folder / value["oid"]
        elif key == "deletedFile":
            del files[value["path"]]
    number = len(repository.commits)
    branch = f"refs/pr/{number}" if handler.query.get("create_pr") else revision
    sha = repository.commit(branch, files, message)
    url = f"{handler.server.url}/{name}"
    request = {"pullRequestUrl": f"{url}/discussions/{number}"} if branch != revision else {}
    return {"success": True, "commitOid": sha, "commitUrl": f"{url}/commit/{sha}", "hookOutput": "", **request}


def info(handler: Handler, name: str, revision: str | None = None) -> Any:
    revision = revision or MAIN
    repository = handler.repository(name, revision)
    siblings: list[dict[str, Any]] = [{"rfilename": path} for path in repository.files(revision)]
    if handler.query.get("blobs"):
        for sibling in siblings:
            sibling["size"] = size(repository.files(revision)[sibling["rfilename"]])
    sha = repository.branches.get(revision, revision)
    return {"id": name, "sha": sha, "private": repository.private, "siblings": siblings, "tags": [], "downloads": 0}


def size(content: bytes | Path) -> int:
    return content.stat().st_size if isinstance(content, Path) else len(content)


def tree(handler: Handler, name: str, revision: str) -> Any:
    files = handler.repository(name, revision).files(revision)
    return [
        {
            "type": "file",
            "path": path,
            "size": size(content),
            "oid": "0" * 40,
        }
        for path, content in files.items()
    ]


def resolve(handler: Handler, name: str, revision: str, path: str) -> Any:
    repository = handler.repository(name, revision)
    content = repository.files(revision).get(path)
    if content is None:
        raise Refused(404, "Entry not found", "EntryNotFound")
    sha = repository.branches.get(revision, revision)
    etag = content.name if isinstance(content, Path) else hashlib.sha1(content).hexdigest()
    return content, {"X-Repo-Commit": sha, "ETag": f'"{etag}"', "X-Linked-Size": str(size(content))}


MODEL = r"/api/models/(?P<name>[\w.-]+/[\w.-]+)"
ROUTES = {
    "POST /api/repos/create": create,
    "POST /api/validate-yaml": lambda handler: handler.json() and {"errors": [], "warnings": []},
    f"POST {MODEL}/branch/(?P<branch>[^/]+)": create_branch,
    f"POST {MODEL}/preupload/(?P<revision>[^/]+)": preupload,
    f"POST {MODEL}/commit/(?P<revision>[^/]+)": commit,
    r"POST /(?P<name>[\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch": large_files,
    "PUT /storage/(?P<oid>[0-9a-f]{64})": store,
    f"GET {MODEL}(/revision/(?P<revision>[^/]+))?": info,
    f"GET {MODEL}/tree/(?P<revision>[^/]+)": tree,
    r"(GET|HEAD) /(?P<name>[\w.-]+/[\w.-]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)": resolve,
}
"""Request -> what answers it."""
