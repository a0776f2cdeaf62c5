"""A name node and a data node on loopback that follow Hadoop's WebHDFS REST API, as far as reading goes.

https://hadoop.apache.org/docs/stable/hadoop-project-dist/hadoop-hdfs/WebHDFS.html: GETFILESTATUS, LISTSTATUS,
GETFILECHECKSUM, and OPEN with offset and length, which the name node answers with a redirect to a data node. Errors are
RemoteException objects. No Hadoop is to be had from PyPI, npm or Debian, so this stands for the real thing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.data.remote_files import serving

PREFIX = "/webhdfs/v1"


class WebHdfs:
    """What the servers have, and how they fail."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.times: dict[str, int] = {}
        self.num_accesses = 0
        self.user = "reader"  # anybody else may read nothing
        self.failures_left = 0
        self.failing = "data"  # or "name"
        self.failure = (500, "RuntimeException", "out of luck")
        self.requests: list[tuple[str, str, int]] = []  # node, operation and path, status
        self.host = self.data_host = ""

    def put(self, path: str, content: bytes) -> None:
        """Write a file, later than any before."""
        self.contents[path] = content
        self.times[path] = 1_700_000_000_000 + 1000 * (len(self.times) + self.times.get(path, 0) % 999)

    @property
    def url(self) -> str:
        return f"webhdfs://{self.user}@{self.host}"

    def status_of(self, path: str) -> dict[str, Any] | None:
        """A FileStatus object."""
        self.num_accesses += 1
        if path in self.contents:
            return {
                "accessTime": self.num_accesses,  # changes with every look, unlike the content
                "blockSize": 134217728,
                "length": len(self.contents[path]),
                "modificationTime": self.times[path],
                "pathSuffix": "",
                "permission": "640",
                "replication": 3,
                "type": "FILE",
            }
        is_folder = any(name.startswith(path.rstrip("/") + "/") for name in self.contents)
        return {"length": 0, "modificationTime": 1, "pathSuffix": "", "type": "DIRECTORY"} if is_folder else None

    def children_of(self, path: str) -> list[dict[str, Any]]:
        """FileStatus objects of what a folder holds; of a file, its own."""
        if path in self.contents:
            return [self.status_of(path) or {}]
        folder = path.rstrip("/") + "/"
        inside = {name[len(folder) :].split("/")[0] for name in self.contents if name.startswith(folder)}
        return [{**(self.status_of(folder + name) or {}), "pathSuffix": name} for name in sorted(inside)]


class _Handler(BaseHTTPRequestHandler):
    served: WebHdfs
    node = ""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name.lower(): values[0] for name, values in parse_qs(parts.query).items()}
        path, operation = unquote(parts.path).removeprefix(PREFIX) or "/", query["op"].upper()
        status, content, headers = self.answer(path, operation, query)
        self.served.requests.append((self.node, f"{operation} {path}", status))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def answer(self, path: str, operation: str, query: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        served = self.served
        if served.failures_left and served.failing == self.node:
            served.failures_left -= 1
            return _problem(*served.failure)
        if query.get("user.name", "dr.who") != served.user:
            return _problem(403, "AccessControlException", f"Permission denied: user={query.get('user.name')}")
        status = served.status_of(path)
        if status is None:
            return _problem(404, "FileNotFoundException", f"File does not exist: {path}")
        if operation == "GETFILESTATUS":
            return _json({"FileStatus": status})
        if operation == "LISTSTATUS":
            return _json({"FileStatuses": {"FileStatus": served.children_of(path)}})
        assert operation == "OPEN", f"a reader does not ask for {operation}"
        if self.node == "name":
            return 307, b"", {"Location": f"http://{served.data_host}{self.path}&namenoderpcaddress=name:8020"}
        first = int(query.get("offset", 0))
        stop = first + int(query["length"]) if "length" in query else None
        return 200, served.contents[path][first:stop], {"Content-Type": "application/octet-stream"}

    def log_message(self, format: str, *args: object) -> None:
        pass


def _json(content: dict[str, Any], status: int = 200) -> tuple[int, bytes, dict[str, str]]:
    return status, json.dumps(content).encode(), {"Content-Type": "application/json"}


def _problem(status: int, exception: str, message: str) -> tuple[int, bytes, dict[str, str]]:
    name = {"exception": exception, "javaClassName": f"org.apache.hadoop.{exception}", "message": message}
    return _json({"RemoteException": name}, status)


@contextmanager
def webhdfs_server() -> Iterator[WebHdfs]:
    """Serves until the block is left."""
    served = WebHdfs()
    servers = []
    for node in ("name", "data"):
        handler = type("Handler", (_Handler,), {"served": served, "node": node})
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
    served.host, served.data_host = (f"127.0.0.1:{server.server_port}" for server in servers)
    with serving(*servers):
        yield served
