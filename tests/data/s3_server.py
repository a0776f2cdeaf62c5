"""A server on loopback that speaks S3 (moto's, with its users and permissions), and fails on request."""

from __future__ import annotations

import functools
import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tests.data.remote_files import serving

CHANGES = ("PUT", "POST", "DELETE")


class S3Server:
    """What the tests ask of it."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[str, str]] = []  # method and path
        self.failures_left = 0
        self.failing_method = ""  # such as "PUT DELETE"; empty: HEAD and GET
        self.status = "500 Internal Server Error"
        self.changes_left: int | None = None  # after so many, every change is refused as from a stranger; None: never
        self.before_request: Callable[[], object] = lambda: None
        self.before_change: Callable[[], object] = lambda: None

    def changes(self) -> list[tuple[str, str]]:
        """The requests that changed something, or tried to."""
        return [request for request in self.requests if request[0] in CHANGES]

    def refuses(self, method: str) -> bool:
        """Whether to refuse this request, because the client is to be taken for dead."""
        if method not in CHANGES or self.changes_left is None:
            return False
        self.changes_left -= 1
        return self.changes_left < 0

    def fails(self, method: str) -> bool:
        """Whether to fail this request."""
        if not self.failures_left or method not in (self.failing_method.split() or ("HEAD", "GET")):
            return False
        self.failures_left -= 1
        return True


@functools.cache
def service(path: str) -> Any:
    """What botocore reads of a service. Every new client would read it again, which takes longer than its requests."""
    from botocore.loaders import JSONFileLoader

    return JSONFileLoader()._load_file(f"{path}.json", open) or JSONFileLoader()._load_file(
        f"{path}.json.gz", gzip.open
    )


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Serves until the block is left."""
    from botocore.loaders import JSONFileLoader
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    moto = DomainDispatcherApplication(create_backend_app)
    served = S3Server()

    class Quiet(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None:
            pass

    def application(environment: dict[str, Any], start_response: Any) -> Any:
        method = environment["REQUEST_METHOD"]
        served.requests.append((method, environment["PATH_INFO"]))
        served.before_request()
        if method in CHANGES:
            served.before_change()
        if served.refuses(method):
            start_response("403 Forbidden", [("Content-Length", "0")])
            return [b""]
        if served.fails(method):
            start_response(served.status, [("Content-Length", "0")])
            return [b""]
        return moto(environment, start_response)

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Quiet)
    served.url = f"http://127.0.0.1:{server.server_port}"
    with serving(server), patch.object(JSONFileLoader, "load_file", lambda self, path: service(path)):
        yield served
