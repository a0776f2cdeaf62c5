"""Tinker's API over HTTP on rank 0: sessions, models, futures, and the queue of what the ranks have to do.

All clients wait in one line, in the order of arrival: clients of Tinker are told to send one request of a model after
the other. One that comes again, from a client that tries again, has the future of the first (``seq_id``). Requests for
samples of the same weights that wait together run together.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bytescale.common.errors import BytescaleError, ConfigError
from bytescale.integrations.tinker import requests
from bytescale.integrations.tinker.requests import Body, RequestRefused
from bytescale.integrations.tinker.trainers import saved_lora
from bytescale.integrations.tinker.wire import PROTOBUF, is_known, message_of, request_of

POLL_SECONDS, SILENT_SECONDS = 20.0, 120.0
MOST_BYTES, MOST_WAITING, MOST_READ, MOST_TOGETHER = 2**28, 1024, 256, 64
_HERE = ("127.0.0.1", "::1", "localhost")
_FLAGS = {"parallel_fwdbwd_chunks": False, "use_pyqwest_transport": False, "sample_max_concurrent_requests": 64}
"""For clients: one request of a model at a time, over a transport that says how long a body is."""


class TinkerServer(ThreadingHTTPServer):
    """Threads of it answer clients. ``take`` and ``finish`` are for the thread that runs the models.

    ``out``: the folder of checkpoints; ``name``: of the model; ``longest``: tokens that fit into one pass;
    ``tokenizer``: its folder, if it has one. Raises ``ConfigError`` for an address that others reach without a token.
    """

    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], token: str, out: Path, name: str, longest: int, tokenizer: str | None = None
    ) -> None:
        if address[0] not in _HERE and not token:
            raise ConfigError(
                f"the address {address[0]} is reached by others, and there is no token",
                so="whoever reaches it could use the machine", fix="set the environment variable BYTESCALE_SERVE_TOKEN",
            )  # fmt: skip
        self.token, self.out, self.name, self.longest, self.tokenizer = token, out, name, longest, tokenizer
        self.known: dict[str, Any] = {}  # sessions, models with their adapters, samplers with the path of their weights
        self.queue: deque[tuple[str, Body]] = deque()
        self.futures: OrderedDict[tuple[str, int], str] = OrderedDict()
        self.results: OrderedDict[str, Body | None] = OrderedDict()
        self.read: deque[str] = deque()
        self.changed = threading.Condition(threading.RLock())
        self.posts: dict[str, Callable[[Body], Body]] = {
            "client/config": lambda body: _FLAGS,
            "client/dynamic_config": lambda body: {},
            "telemetry": lambda body: {"status": "accepted"},
            "session_heartbeat": lambda body: {"type": "session_heartbeat"},
            "create_session": lambda body: {"type": "create_session", "session_id": self._new(None)},
            "create_model": lambda body: self._new_model(body, {"do": "create", "lora": requests.lora_of(body)}),
            "unload_model": lambda body: self._work(body, do="unload"),
            "get_info": self._info,
            "forward_backward": lambda body: self._pass(body, "forward_backward_input", not body.get("forward_only")),
            "forward": lambda body: self._pass(body, "forward_input", False),
            "optim_step": lambda body: self._work(body, do="update", adam=requests.adam_of(body)),
            "save_weights": lambda body: self._work(body, do="save", name=requests.name_of(body.get("path"))),
            "load_weights": self._load,
            "save_weights_for_sampler": self._snapshot,
            "weights_info": self._weights_info,
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
            return {"sampler_id": sampler, "base_model": self.name, "model_path": self._about(sampler) or None}
        if method == "POST" and route in self.posts:
            requests.refuse_options(body)
            return self.posts[route](body)
        raise RequestRefused(f"there is no {method} {route[:150]} here", fix="look at the documentation", status=404)

    def take(self, seconds: float) -> tuple[list[str], Body]:
        """Numbers of the next futures and their work; without any for ``seconds``, work that does nothing."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.queue, seconds):
                return [], {"do": ""}
            taken = [self.queue.popleft()]
            work = taken[0][1]
            if work["do"] == "sample":
                alike = [own for own in self.queue if own[1]["do"] == "sample" and own[1]["path"] == work["path"]]
                taken += alike[: MOST_TOGETHER - 1]
                self.queue = deque(own for own in self.queue if own not in taken)
                work = work | {"requests": [request for _, own in taken for request in own["requests"]]}
            return [number for number, _ in taken], work

    def finish(self, numbers: list[str], results: list[Body]) -> None:
        with self.changed:
            self.results.update(zip(numbers, results, strict=True))
            for result in results:
                if "lora" in result:  # of a model that was made
                    self.known[result["model_id"]] = result["lora"]
            self.changed.notify_all()

    def _put(self, work: Body, key: str, place: int | None) -> str:
        """Queue what ``Trainers`` has to do. Returns the number of its future, or of that which was there."""
        with self.changed:
            if place is not None and (key, place) in self.futures:
                return self.futures[key, place]
            if len(self.results) >= MOST_WAITING:
                old = next((number for number, result in self.results.items() if result is not None), "")
                if not old:
                    raise RequestRefused(f"{MOST_WAITING} requests wait", fix="send it again later", status=429)
                del self.results[old]  # nobody has asked for it, or not for long
            number = secrets.token_hex(12)
            if type(place) is int:
                self.futures[key, place] = number
                while len(self.futures) > MOST_WAITING:
                    self.futures.popitem(last=False)
            self.results[number] = None
            self.queue.append((number, work))
            self.changed.notify_all()
            return number

    def _work(self, body: Body, **work: Any) -> Body:
        model_id = body.get("model_id")
        self._about(model_id)
        number = self._put({"model_id": model_id, **work}, str(model_id), body.get("seq_id"))
        return {"request_id": number, "model_id": model_id}

    def _about(self, key: Any) -> Any:
        with self.changed:
            if isinstance(key, str) and key in self.known:
                return self.known[key]
        what = f"there is no {str(key)[:150]!r}"
        raise RequestRefused(what, fix="make a session, model or sampler first", status=404)

    def _new(self, about: Any) -> str:
        with self.changed:
            self.known[key := secrets.token_hex(12)] = about
            return key

    def _new_model(self, body: Body, work: Body) -> Body:
        self._about(body.get("session_id"))
        if (name := body.get("base_model")) not in (self.name, None):
            raise RequestRefused(f"base_model is {str(name)[:150]!r}", fix=f"this server has {self.name!r}")
        model_id = requests.name_of(f"{body['session_id']}:train:{body.get('model_seq_id', 0)}")
        with self.changed:
            self.known.setdefault(model_id, None)
        return {"request_id": self._put(work | {"model_id": model_id}, model_id, 0), "model_id": model_id}

    def _info(self, body: Body) -> Body:
        lora = self._about(body.get("model_id"))
        data = {"model_name": self.name, "tokenizer_id": self.tokenizer}
        about = {"is_lora": lora is not None, "lora_rank": lora and lora["rank"]}
        return {"type": "get_info", "model_id": body["model_id"], "model_name": self.name, "model_data": data, **about}

    def _pass(self, body: Body, key: str, backward: bool) -> Body:
        return self._work(body, do="run", backward=backward, **requests.batch_of(requests.section_of(body, key)))

    def _load(self, body: Body) -> Body:
        source, name = requests.path_of(body.get("path"), "weights")
        creates = body.get("session_id") is not None
        work = {"do": "load", "source": source, "name": name, "create": creates}
        work["optimizer"] = body.get("optimizer") is not False
        return self._new_model(body, work) if creates else self._work(body, **work)

    def _weights_info(self, body: Body) -> Body:
        source, name = requests.path_of(body.get("tinker_path"), "weights")
        try:
            lora = saved_lora(self.out / source / "weights" / name)
        except OSError as error:
            raise RequestRefused(
                f"there is no checkpoint {name} of {source}", fix="save it first", status=404
            ) from error
        return {"base_model": self.name, "is_lora": lora is not None, "lora_rank": lora and lora["rank"]}

    def _snapshot(self, body: Body) -> Body:
        if body.get("kind", "snapshot") != "snapshot":
            raise RequestRefused("inflight weights were asked for", fix="use a snapshot")
        name = requests.name_of(body.get("path") or f"unnamed-{secrets.token_hex(8)}")
        path = f"tinker://{body.get('model_id')}/sampler_weights/{name}"
        sampler = None if body.get("path") else self._new(path)
        return self._work(body, do="snapshot", name=name, sampler=sampler)

    def _weights(self, body: Body) -> str:
        """The path of what samples are asked from; empty: the model of the server."""
        if body.get("model_path"):
            requests.path_of(body["model_path"], "sampler_weights")
        elif body.get("base_model") != self.name:
            raise RequestRefused("there is no model_path, and base_model is another one", fix=f"use {self.name!r}")
        return body.get("model_path") or ""

    def _new_sampler(self, body: Body) -> Body:
        self._about(body.get("session_id"))
        return {"type": "create_sampling_session", "sampling_session_id": self._new(self._weights(body))}

    def _sample(self, body: Body) -> Body:
        sampler = body.get("sampling_session_id")
        path = self._weights(body) if sampler is None else self._about(sampler)
        request = requests.sampling_of(body, self.longest, has_tokenizer=self.tokenizer is not None)
        work = {"do": "sample", "path": path, "requests": [request]}
        number = self._put(work, str(sampler), None if sampler is None else body.get("seq_id"))
        names = [f"{number}:{place}" for place in range(request["num_samples"])]
        return {"request_id": number, "sample_sequence_ids": names}

    def _retrieve(self, body: Body) -> Body:
        number = body.get("request_id")
        with self.changed:
            if not isinstance(number, str) or number not in self.results:
                what = f"there is no future {str(number)[:150]!r}"
                raise RequestRefused(what, fix="send its request again", status=410)
            self.changed.wait_for(lambda: self.results.get(number, {}) is not None, POLL_SECONDS)
            if (result := self.results.get(number)) is None:
                return {"type": "try_again", "request_id": number, "queue_state": "active"}
            if number not in self.read:
                self.read.append(number)
            while len(self.read) > MOST_READ:
                self.results.pop(self.read.popleft(), None)
            return result


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
        # Clients before 0.25 take both, and need no package here.
        takes_message = PROTOBUF in self.headers.get("Accept", "") and is_known()
        is_message = takes_message and ("sequences" in result or "loss_fn_outputs" in result)
        self._reply(status, result, is_message=is_message)

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
        host = re.sub(r":\d+$", "", self.headers.get("Host", "")).strip("[]")
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
        return route, body if isinstance(body, dict) else requests.section_of(body, "request")

    def _reply(self, status: int, result: Body, *, is_message: bool) -> None:
        content = message_of(result) if is_message else json.dumps(result).encode()
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", PROTOBUF if is_message else "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
