"""A Hugging Face hub on loopback: what its client asks when files are pushed (repositories, LFS,
commits), and the statuses that it refuses with.
"""

import base64
import hashlib
import json
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml
from served_here import served

TOKEN, USER = "hf_of_the_tests", "me"


@dataclass
class Repository:
    """files: by path, of the last commit; commits: what each of them added and deleted."""

    private: bool
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors\n"})
    commits: list[dict[str, list[str]]] = field(default_factory=list)

    @property
    def sha(self) -> str:
        return hashlib.sha1(str(len(self.commits)).encode()).hexdigest()


class Hub(ThreadingHTTPServer):
    """refuse: of a path's last part or method, the status to answer with."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.stored: dict[str, bytes] = {}  # by sha256
        self.asked: list[str] = []
        self.refuse: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.route("GET")

    def do_POST(self) -> None:
        self.route("POST")

    def do_PUT(self) -> None:
        self.route("PUT")

    def route(self, method: str) -> None:
        body, path = self.body(), self.path.partition("?")[0]
        parts = path.strip("/").split("/")
        self.server.asked.append(f"{method} {path}")
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        for word, status in self.server.refuse.items():
            if word in (method, *parts):
                return self.reply(status, {"error": "not for you"})
        if not known and method != "PUT":  # what is put is signed by its address
            return self.reply(401, {"error": "Invalid username or password."})
        if parts[:2] == ["api", "repos"]:
            return self.create(json.loads(body))
        if parts == ["api", "validate-yaml"]:
            return self.validate(json.loads(body)["content"])
        if parts[:1] == ["stored"]:
            return self.put(parts[1], body)
        lfs = parts[-3:] == ["lfs", "objects", "batch"]
        name = "/".join(parts[:2]).removesuffix(".git") if lfs else "/".join(parts[2:4])
        repo = self.server.repositories.get(name)
        if repo is None:
            return self.reply(404, {"error": "Repository not found"})
        if lfs:
            return self.batch(json.loads(body))
        if parts[4:5] == ["tree"]:
            return self.reply(200, [described(*file) for file in repo.files.items()])
        if method == "GET":
            names = [{"rfilename": path} for path in repo.files]
            about = {"id": name, "private": repo.private, "sha": repo.sha, "siblings": names}
            return self.reply(200, about)
        act = {"preupload": self.preupload, "commit": self.commit}[parts[4]]
        return act(name, repo, body)

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        read = b""
        while size := int(self.rfile.readline(), 16):
            read += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return read

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] != USER:
            return self.reply(403, {"error": "You don't have the rights to create a model there"})
        if name in self.server.repositories:
            return self.reply(409, {"error": "exists", "url": f"{self.server.url}/{name}"})
        self.server.repositories[name] = Repository(asked.get("visibility") == "private")
        return self.reply(200, {"url": f"{self.server.url}/{name}", "name": name})

    def validate(self, card: str) -> None:
        """As the hub does: the header is read, a base model is a name of the hub."""
        found = yaml.safe_load(card.split("---\n")[1])
        wrong = [] if "/" in found.get("base_model", "/") else [{"message": "base_model: no name"}]
        self.reply(400 if wrong else 200, {"errors": wrong, "warnings": []})

    def preupload(self, name: str, repo: Repository, body: bytes) -> None:
        found = []
        for file in json.loads(body)["files"]:
            path = file["path"]
            large = path.endswith(".safetensors")
            oid = None
            if path in repo.files:
                held = repo.files[path]
                oid = hashlib.sha256(held).hexdigest() if large else git_hash(held)
            mode = "lfs" if large else "regular"
            found.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.reply(200, {"files": found})

    def batch(self, asked: dict[str, Any]) -> None:
        found = []
        for one in asked["objects"]:
            upload = {"href": f"{self.server.url}/stored/{one['oid']}"}
            there = one["oid"] in self.server.stored
            found.append(one if there else one | {"actions": {"upload": upload}})
        self.reply(200, {"transfer": "basic", "objects": found})

    def put(self, oid: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self.reply(400, {"error": "other bytes than were announced"})
        self.server.stored[oid] = body
        return self.reply(200, {})

    def commit(self, name: str, repo: Repository, body: bytes) -> None:
        if name.split("/")[0] != USER:
            return self.reply(403, {"error": "no right to write there"})
        made: dict[str, list[str]] = {"added": [], "deleted": []}
        for line in map(json.loads, body.splitlines()):
            key, value = line["key"], line["value"]
            if key == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                repo.files[value["path"]] = self.server.stored[value["oid"]]
            elif key == "deletedFile":
                del repo.files[value["path"]]
            if key != "header":
                made["deleted" if key == "deletedFile" else "added"].append(value["path"])
        repo.commits.append(made)
        url = f"{self.server.url}/{name}/commit/{repo.sha}"
        return self.reply(200, {"success": True, "commitUrl": url, "commitOid": repo.sha})

    def reply(self, status: int, answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status >= 400:
            self.send_header("X-Error-Message", answer.get("error", "bad request"))
        self.end_headers()
        self.wfile.write(body)


def described(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def running() -> AbstractContextManager[Hub]:
    return served(Hub())
