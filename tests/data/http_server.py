"""A web server on loopback, whose files and failures a test decides."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.data.remote_files import serving


class Files:
    """What the server has, and how many of the next requests it answers with 500."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.failures_left = 0
        self.only_reads = False  # and not the questions for a file's size
        self.forbidden = False
        self.requests: list[tuple[str, str | None, int]] = []  # path, range asked for, status
        self.url = ""


@contextmanager
def http_server() -> Iterator[Files]:
    """The server, until the block is left."""
    served = Files()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            content = served.contents.get(self.path)
            asked = self.headers.get("Range")
            status = 200
            if served.forbidden:
                status, content = 403, b""
            elif content is None:
                status, content = 404, b""
            elif served.failures_left and (asked or not served.only_reads):
                served.failures_left -= 1
                status, content = 500, b""
            elif asked:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                whole, content = len(content), content[int(first) : int(last or len(content)) + 1]
                status = 206
            served.requests.append((self.path, asked, status))
            self.send_response(status)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{zlib.crc32(served.contents.get(self.path, b""))}"')
            if status == 206:
                self.send_header("Content-Range", f"bytes {first}-{int(first) + len(content) - 1}/{whole}")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if with_body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_port}"
    with serving(server):
        yield served
