"""The messages of Tinker that are protocol buffers since its client 0.25. Package ``tinker`` knows them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np

from bytescale.common.errors import ConfigError, DataError

PROTOBUF = "application/x-protobuf"


def is_known() -> bool:
    """Whether the package that knows the messages is there."""
    return find_spec("tinker") is not None


def request_of(body: bytes) -> dict[str, Any]:
    """A ForwardBackwardRequest as older clients send it, as JSON's object. Raises ``DataError`` for what is none."""
    messages = _messages()
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]

    try:
        message = messages.ForwardBackwardRequest.FromString(body)
        texts = {key: own.text for key, own in message.loss_fn_config_v2.items() if own.WhichOneof("value") == "text"}
        data = [_datum(datum, messages) for datum in message.data]
    except (DecodeError, ValueError, KeyError) as error:
        raise DataError(f"the body is no ForwardBackwardRequest ({error})", fix="use a client of Tinker") from error
    given = {"data": data, "loss_fn": message.loss_fn, "loss_fn_config": {**message.loss_fn_config, **texts}}
    numbers = {"seq_id": message.seq_id or None, "forward_only": message.forward_only}
    return {"model_id": message.model_id, "forward_backward_input": given, **numbers}


def message_of(result: dict[str, Any]) -> bytes:
    """The result of a pass or of sampling. Log-probabilities are in fp32, None among them is NaN."""
    messages = _messages()
    if "sequences" in result:
        made = messages.SampleResponse(prompt_logprobs=np.array(result["prompt_logprobs"] or [], "<f4").tobytes())
        for own in result["sequences"]:
            tokens, logprobs = np.array(own["tokens"], "<i4").tobytes(), np.array(own["logprobs"], "<f4").tobytes()
            made.sequences.add(
                stop_reason=f"STOP_REASON_{own['stop_reason'].upper()}", tokens=tokens, logprobs=logprobs
            )
        return made.SerializeToString()
    rows = [np.array(own["logprobs"]["data"], "<f4") for own in result["loss_fn_outputs"]]
    offsets = np.cumsum([0, *(row.nbytes for row in rows)]).astype("<i8").tobytes()
    tensor = messages.BatchedTensor(data=np.concatenate(rows).tobytes(), offsets=offsets, dtype="DTYPE_FLOAT32")
    record = messages.ArrayRecord(num_datums=len(rows), fields={"logprobs": tensor})
    kind, metrics = result["loss_fn_output_type"], result["metrics"]
    made = messages.ForwardBackwardOutput(loss_fn_output_type=kind, loss_fn_outputs=[record], metrics=metrics)
    return made.SerializeToString()


def _datum(datum: Any, messages: Any) -> dict[str, Any]:
    chunks = [
        {"type": own.WhichOneof("chunk"), "tokens": np.frombuffer(own.encoded_text.tokens, "<i4").tolist()}
        for own in datum.model_input
    ]
    inputs = {key: _tensor(own, messages) for key, own in datum.loss_fn_inputs.items()}
    return {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}


def _tensor(tensor: Any, messages: Any) -> dict[str, Any]:
    if tensor.WhichOneof("encoding") == "sparse_csr":
        return {"sparse_crow_indices": []}  # refused by name, as JSON's are
    dtype = {messages.DTYPE_FLOAT32: "<f4", messages.DTYPE_INT64: "<i8"}[tensor.dtype]
    return {"data": np.frombuffer(tensor.dense, dtype).tolist(), "shape": list(tensor.shape) or None}


def _messages() -> Any:
    try:
        from tinker.proto import tinker_public_pb2
    except ImportError as error:
        raise ConfigError(
            "the client sends protocol buffers, and the server has no package tinker",
            so="it does not know the messages",
            fix="pip install 'bytescale[tinker]' beside the server, or use a client before 0.25",
        ) from error
    return tinker_public_pb2
