"""A server of the Hugging Face Hub's API on loopback, whose files come from a second origin, as the hub's do."""

import contextlib
import hashlib
import json
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from object_server import LoopbackServer, QuietHandler


@dataclass
class Hub:
    """One data set: its files by commit, the commit of each revision, and the requests that were made."""

    name: str
    commits: dict[str, dict[str, bytes]]
    revisions: dict[str, str]
    token: str | None = None
    gated: bool = False
    failures: list[int] = field(default_factory=list)  # statuses of the next answers
    endpoint: str = ""
    files: str = ""  # the URL of the second origin
    requests: list[tuple[str, str]] = field(default_factory=list)  # method and path
    leaked: list[str] = field(default_factory=list)  # tokens that the second origin was sent

    def requested(self, part: str) -> int:
        return sum(part in path for _, path in self.requests)


class _Handler(QuietHandler):
    hub: Hub

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, status: int, code: str) -> None:
        self.answer(status, X_Error_Code=code, X_Error_Message=code)

    def json(self, value: Any) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json")


class _Names(_Handler):
    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        if hub.failures:
            self.fail(hub.failures.pop(0), "")
            return
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.fail(*((403, "GatedRepo") if hub.gated else (401, "RepoNotFound")))
            return
        api, resolve = f"/api/datasets/{hub.name}/", f"/datasets/{hub.name}/resolve/"
        if path.startswith(resolve):
            commit, _, key = path.removeprefix(resolve).partition("/")
            if key not in hub.commits.get(commit, {}):
                self.fail(404, "EntryNotFound")
            else:
                self.answer(302, Location=f"{hub.files}/{commit}/{key}")
        elif not path.startswith(api):
            self.fail(404, "RepoNotFound")
        else:
            self.describe(*path.removeprefix(api).split("/", 1), body)

    do_HEAD = do_POST = do_GET

    def describe(self, what: str, rest: str, body: str) -> None:
        hub = self.hub
        if what == "revision":
            commit = hub.revisions.get(rest)
            if commit is None:
                self.fail(404, "RevisionNotFound")
            else:
                self.json({"id": hub.name, "sha": commit, "tags": [], "siblings": []})
            return
        commit, _, key = rest.partition("/")
        files = hub.commits[commit]
        if what == "paths-info":
            self.json([self.file(name, files[name]) for name in parse_qs(body)["paths"] if name in files])
            return
        start = f"{key}/" if key else ""
        below = [name.removeprefix(start) for name in files if name.startswith(start)]
        if not below:
            self.fail(404, "EntryNotFound")
            return
        folders = sorted({name.split("/")[0] for name in below if "/" in name})
        entries = [{"type": "directory", "path": start + name, "oid": "0" * 40} for name in folders]
        self.json(entries + [self.file(start + name, files[start + name]) for name in below if "/" not in name])

    def file(self, name: str, data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        found = {"type": "file", "path": name, "size": len(data), "oid": digest[:40]}
        if name.endswith("0.parquet"):  # small files are in git itself
            return found
        return {**found, "lfs": {"oid": digest, "size": len(data), "pointerSize": 134}}


class _Files(_Handler):
    def do_GET(self) -> None:
        if self.headers.get("Authorization"):
            self.hub.leaked.append(self.headers["Authorization"])
        commit, _, key = unquote(self.path).lstrip("/").partition("/")
        data = self.hub.commits[commit][key]
        asked = self.headers.get("Range")
        self.hub.requests.append((self.command, f"/files/{key} {asked or ''}".strip()))
        if asked is None:
            self.answer(200, data, ETag='"of the files"')
            return
        first, last = (int(part) for part in asked.removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        place = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        self.answer(206, part, ETag='"of the files"', Content_Range=place)

    do_HEAD = do_GET


@contextlib.contextmanager
def serving(hub: Hub) -> Generator[Hub]:
    """Serve a data set until the end of the block, and set the endpoint of `hub`."""
    kinds = (type(kind.__name__, (kind,), {"hub": hub}) for kind in (_Names, _Files))
    with LoopbackServer(next(kinds)) as names, LoopbackServer(next(kinds)) as files:
        hub.endpoint, hub.files = names.endpoint, files.endpoint
        yield hub
