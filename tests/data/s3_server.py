"""A server on loopback that speaks S3 (moto's, with its users and permissions), and fails on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.data.remote_files import serving


class S3Server:
    """What the tests ask of it."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[str, str]] = []  # method and path
        self.failures_left = 0
        self.failing_method = ""  # HEAD, GET; empty: both
        self.status = "500 Internal Server Error"

    def fails(self, method: str) -> bool:
        """Whether to fail this request."""
        if not self.failures_left or method not in ("HEAD", "GET") or self.failing_method not in ("", method):
            return False
        self.failures_left -= 1
        return True


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Serves until the block is left."""
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
        if served.fails(method):
            start_response(served.status, [("Content-Length", "0")])
            return [b""]
        return moto(environment, start_response)

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Quiet)
    served.url = f"http://127.0.0.1:{server.server_port}"
    with serving(server):
        yield served
