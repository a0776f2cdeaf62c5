"""Tinker's API over HTTP on rank 0: sessions, models, futures, and the queue of what the ranks have to do.

Requests of a model run in the order of their ``seq_id``, whenever they arrive; one that comes again, from a client that
tries again, has the future of the first. All clients wait in one line. Requests for samples of the same weights that
wait together run together.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from bytescale.common.errors import BytescaleError, ConfigError
from bytescale.integrations.tinker.requests import (
    Body,
    RequestRefused,
    adam_of,
    batch_of,
    lora_of,
    name_of,
    path_of,
    refuse_options,
    sampling_of,
    section_of,
)  # fmt: skip
from bytescale.integrations.tinker.wire import PROTOBUF, message_of, request_of

POLL_SECONDS, SILENT_SECONDS = 20.0, 120.0
MOST_BYTES, MOST_WAITING, MOST_RESULTS, MOST_TOGETHER = 2**28, 4096, 8192, 64
_HERE = ("127.0.0.1", "::1", "localhost")
_NO_WORK: Body = {"do": ""}


@dataclass
class Line:
    """Requests of a model or sampling session: the number of the next, those that came early, and all futures."""

    about: Any
    next: int = 1
    early: dict[int, tuple[str, Body] | None] = field(default_factory=dict)
    futures: OrderedDict[int, str] = field(default_factory=OrderedDict)


class TinkerServer(ThreadingHTTPServer):
    """Threads of it answer clients. ``take`` and ``finish`` are for the thread that runs the models.

    ``name``: of the model; ``longest``: tokens that fit into one pass; ``tokenizer``: its folder, if it has one. Raises
    ``ConfigError`` for an address that others reach without a token.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], token: str, name: str, longest: int, tokenizer: str | None) -> None:
        if address[0] not in _HERE and not token:
            raise ConfigError(
                f"the address {address[0]} is reached by others, and there is no token",
                so="whoever reaches it could use the machine", fix="set the environment variable BYTESCALE_SERVE_TOKEN",
            )  # fmt: skip
        self.token, self.name, self.longest, self.tokenizer = token, name, longest, tokenizer
        self.lines: dict[str, Line] = {}
        self.queue: deque[tuple[str, Body]] = deque()
        self.results: OrderedDict[str, Body | None] = OrderedDict()
        self.changed = threading.Condition(threading.RLock())
        work = self._work
        self.posts: dict[str, Callable[[Body], Body]] = {
            "client/config": lambda body: {"use_pyqwest_transport": False, "sample_max_concurrent_requests": 64},
            "client/dynamic_config": lambda body: {},
            "telemetry": lambda body: {"status": "accepted"},
            "session_heartbeat": lambda body: {"type": "session_heartbeat"},
            "create_session": lambda body: {"type": "create_session", "session_id": self._new_line(None)},
            "create_model": lambda body: self._new_model(body, {"do": "create", "lora": lora_of(body)}),
            "unload_model": lambda body: work(body, "unload", dict),
            "get_info": self._info,
            "forward_backward": lambda body: self._pass(body, "forward_backward_input", not body.get("forward_only")),
            "forward": lambda body: self._pass(body, "forward_input", False),
            "optim_step": lambda body: work(body, "update", lambda: {"adam": adam_of(body)}),
            "save_weights": lambda body: work(body, "save", lambda: {"name": name_of(body.get("path"))}),
            "load_weights": self._load,
            "save_weights_for_sampler": lambda body: work(body, "snapshot", lambda: self._snapshot(body)),
            "create_sampling_session": self._new_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
        }
        super().__init__(address, Handler)

    def answer(self, method: str, route: str, body: Body) -> Body:
        """The JSON of a request. Raises ``RequestRefused``."""
        if method == "GET" and route == "healthz":
            return {"status": "ok"}
        if method == "GET" and route == "get_server_capabilities":
            return {"supported_models": [{"model_name": self.name, "max_context_length": self.longest}]}
        if method == "GET" and route.startswith("samplers/"):
            sampler = route.removeprefix("samplers/")
            return {"sampler_id": sampler, "base_model": self.name, "model_path": self._line(sampler).about or None}
        if method == "POST" and route in self.posts:
            refuse_options(body)
            return self.posts[route](body)
        raise RequestRefused(f"there is no {method} {route[:150]} here", fix="look at the documentation", status=404)

    def take(self, seconds: float) -> tuple[list[str], Body]:
        """Numbers of the next futures and their work; without any for ``seconds``, work that does nothing."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.queue, seconds):
                return [], _NO_WORK
            number, work = self.queue.popleft()
            alike = [
                own for own in self.queue if work["do"] == own[1]["do"] == "sample" and work["path"] == own[1]["path"]
            ]
            for own in alike[: MOST_TOGETHER - 1]:
                self.queue.remove(own)
                work = work | {"requests": work["requests"] + own[1]["requests"]}
            return [number, *(own[0] for own in alike[: MOST_TOGETHER - 1])], work

    def finish(self, numbers: list[str], results: list[Body]) -> None:
        with self.changed:
            self.results.update(zip(numbers, results, strict=True))
            for result in results:
                if "lora" in result:  # of a model that was made
                    self.lines[result["model_id"]].about = result["lora"]
            for number in list(self.results)[:-MOST_RESULTS]:
                if self.results[number] is not None:
                    del self.results[number]
            self.changed.notify_all()

    def _put(self, work: Body, line: Line, place: int | None, *, ordered: bool) -> str:
        """Queue what ``Trainers`` has to do. Returns the number of its future."""
        with self.changed:
            if place is not None and place in line.futures:
                return line.futures[place]
            if len(self.queue) >= MOST_WAITING:
                raise RequestRefused(f"{MOST_WAITING} requests wait", fix="send it again later", status=429)
            number = secrets.token_hex(12)
            self.results[number] = None
            if place is not None:
                line.futures[place] = number
                for old in list(line.futures)[:-MOST_WAITING]:
                    del line.futures[old]
            if ordered and place is not None:
                self._arrive(line, place, (number, work))
            else:
                self.queue.append((number, work))
            self.changed.notify_all()
            return number

    def _arrive(self, line: Line, place: int, own: tuple[str, Body] | None) -> None:
        """Queue what is next in line. None was refused: what comes behind it does not wait for it."""
        line.early[place] = own
        while line.next in line.early:
            if (ready := line.early.pop(line.next)) is not None:
                self.queue.append(ready)
            line.next += 1
        self.changed.notify_all()

    def _work(self, body: Body, do: str, arguments: Callable[[], Body]) -> Body:
        """Work on a model, in its order."""
        model_id, place = body.get("model_id"), body.get("seq_id")
        line = self._line(model_id)
        if place is not None and (type(place) is not int or place < 1):
            raise RequestRefused(f"seq_id is {str(place)[:50]}", fix="count from 1")
        try:
            work = {"do": do, "model_id": model_id, **arguments()}
        except Exception:  # refused, or not of Tinker's form
            with self.changed:
                if place is not None and place >= line.next:
                    self._arrive(line, place, None)
            raise
        return {"request_id": self._put(work, line, place, ordered=True), "model_id": model_id}

    def _line(self, key: Any) -> Line:
        with self.changed:
            if isinstance(key, str) and key in self.lines:
                return self.lines[key]
        raise RequestRefused(
            f"there is no {str(key)[:150]!r}", fix="make a session, model or sampler first", status=404
        )

    def _new_line(self, about: Any) -> str:
        with self.changed:
            key = secrets.token_hex(12)
            self.lines[key] = Line(about)
            return key

    def _new_model(self, body: Body, work: Body) -> Body:
        self._line(body.get("session_id"))
        if body.get("base_model") not in (self.name, None):
            raise RequestRefused(
                f"base_model is {str(body['base_model'])[:150]!r}", fix=f"this server has {self.name!r}"
            )
        model_id = name_of(f"{body['session_id']}:train:{body.get('model_seq_id', 0)}")
        with self.changed:
            line = self.lines.setdefault(model_id, Line(None))
        work = work | {"model_id": model_id}
        return {"request_id": self._put(work, line, 0, ordered=False), "model_id": model_id}

    def _info(self, body: Body) -> Body:
        lora = self._line(body.get("model_id")).about
        data = {"model_name": self.name, "tokenizer_id": self.tokenizer}
        about = {"is_lora": lora is not None, "lora_rank": lora and lora["rank"]}
        return {"type": "get_info", "model_id": body["model_id"], "model_name": self.name, "model_data": data, **about}

    def _pass(self, body: Body, key: str, backward: bool) -> Body:
        return self._work(body, "run", lambda: batch_of(section_of(body, key)) | {"backward": backward})

    def _load(self, body: Body) -> Body:
        def arguments() -> Body:
            source, name = path_of(body.get("path"), "weights")
            return {"source": source, "name": name, "optimizer": body.get("optimizer") is not False, "create": creates}

        creates = body.get("session_id") is not None
        return self._new_model(body, {"do": "load", **arguments()}) if creates else self._work(body, "load", arguments)

    def _snapshot(self, body: Body) -> Body:
        if body.get("kind", "snapshot") != "snapshot":
            raise RequestRefused("inflight weights were asked for", fix="use a snapshot")
        name = name_of(body.get("path") or f"unnamed-{secrets.token_hex(8)}")
        path = f"tinker://{body['model_id']}/sampler_weights/{name}"
        return {"name": name, "sampler": None if body.get("path") else self._new_line(path)}

    def _weights(self, body: Body) -> str:
        """The path of what samples are asked from; empty: the model of the server."""
        if body.get("model_path"):
            path_of(body["model_path"], "sampler_weights")
        elif body.get("base_model") != self.name:
            raise RequestRefused("there is no model_path, and base_model is another one", fix=f"use {self.name!r}")
        return body.get("model_path") or ""

    def _new_sampler(self, body: Body) -> Body:
        self._line(body.get("session_id"))
        return {"type": "create_sampling_session", "sampling_session_id": self._new_line(self._weights(body))}

    def _sample(self, body: Body) -> Body:
        line, place = Line(None), None
        if body.get("sampling_session_id") is not None:
            line, place = self._line(body["sampling_session_id"]), body.get("seq_id")
        path = self._weights(body) if line.about is None else line.about
        request = sampling_of(body, self.longest)
        number = self._put({"do": "sample", "path": path, "requests": [request]}, line, place, ordered=False)
        return {
            "request_id": number,
            "sample_sequence_ids": [f"{number}:{own}" for own in range(request["num_samples"])],
        }

    def _retrieve(self, body: Body) -> Body:
        number = body.get("request_id")
        with self.changed:
            if not isinstance(number, str) or number not in self.results:
                raise RequestRefused(
                    f"there is no future {str(number)[:150]!r}", fix="send the request again", status=410
                )
            self.changed.wait_for(lambda: self.results.get(number, _NO_WORK) is not None, POLL_SECONDS)
            waits = {"type": "try_again", "request_id": number, "queue_state": "active"}
            return self.results.get(number) or waits


class Handler(BaseHTTPRequestHandler):
    """One client's connection. It logs nothing."""

    server: TinkerServer
    protocol_version, server_version, timeout = "HTTP/1.1", "bytescale", SILENT_SECONDS

    def do_GET(self) -> None:
        """Answer, whatever came."""
        try:
            status, result = 200, self.server.answer(self.command, *self._request())
            status = 408 if result.get("type") == "try_again" else 200
        except BytescaleError as error:
            status, result = getattr(error, "status", 400), {"detail": str(error)}
        except (AttributeError, TypeError, ValueError, KeyError, RecursionError):
            status, result = 400, {"detail": "The request is not of the form of Tinker's."}
        except OSError:  # the client is gone, or silent
            self.close_connection = True
            return
        is_message = PROTOBUF in self.headers.get("Accept", "") and ("sequences" in result or "metrics" in result)
        self._reply(status, result, is_message=is_message and result.keys() != {"metrics"})

    do_POST = do_DELETE = do_PUT = do_GET

    def log_message(self, *_: Any) -> None:
        pass

    def _request(self) -> tuple[str, Body]:
        """Route and body. Raises ``RequestRefused``, and what JSON raises."""
        server, kind = self.server, self.headers.get("Content-Type", "").partition(";")[0]
        self.close_connection = True  # unless the body is read
        given = self.headers.get("X-API-Key", "").encode()
        if server.token and not hmac.compare_digest(given, server.token.encode()):
            raise RequestRefused("the token is missing or wrong", fix="send it as X-API-Key", status=401)
        host = self.headers.get("Host", "").rpartition(":")[0].strip("[]")
        if not server.token and host not in _HERE:  # a page in a browser whose name was bound to this address
            raise RequestRefused(f"the host is {host[:150]!r}", fix="use 127.0.0.1, or set a token", status=403)
        size = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or "Content-Encoding" in self.headers or not size.isdecimal():
            raise RequestRefused("the body is encoded, or its length unknown", fix="send it plainly", status=411)
        if int(size) > MOST_BYTES:
            raise RequestRefused(f"the body has {size} bytes", fix=f"send at most {MOST_BYTES}", status=413)
        content = self.rfile.read(int(size))
        self.close_connection = False
        route = self.path.removeprefix("/api/v1/")
        if kind == PROTOBUF:
            return route, request_of(content)
        if content and kind != "application/json":  # what pages in a browser may send without asking
            raise RequestRefused(f"the body is {kind[:50]!r}", fix="send application/json", status=415)
        body = json.loads(content or b"{}")
        return route, body if isinstance(body, dict) else section_of(body, "request")

    def _reply(self, status: int, result: Body, *, is_message: bool) -> None:
        try:
            content = message_of(result) if is_message else json.dumps(result).encode()
        except BytescaleError as error:
            status, is_message, content = 400, False, json.dumps({"detail": str(error)}).encode()
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", PROTOBUF if is_message else "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
