"""Hand-over between two vLLM servers (vLLM 0.32, `NixlConnector`): which fields each leg gets and what one tells the other.

The prefill leg computes the prompt and one token that is thrown away; its answer's `kv_transfer_params` go to the decode leg
verbatim, under the same request id. The blocks stay leased for `LEASE_S` after the prefill leg's answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from workers.direct.bodies import with_fields

LEASE_S = 30.0
REQUEST_ID_HEADER = "x-request-id"

_PREFILL_FIELDS: Mapping[str, Any] = {
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "min_tokens": 0,
    "stream": False,
    "stream_options": None,
    "kv_transfer_params": {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    },
}


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class HandoffMissing(ValueError):
    """The prefill leg answered without `kv_transfer_params`: the server has no KV connector."""


def prefill_body(body: bytes) -> bytes:
    """The prefill leg's body. `max_completion_tokens` is overridden too: where a client sends it, it counts instead."""
    return with_fields(body, _PREFILL_FIELDS)


def handoff(answer: bytes) -> bytes:
    """The prefill leg's `kv_transfer_params`, byte for byte. Raises HandoffMissing."""
    try:
        raw = bytes(msgspec.json.decode(answer, type=_PrefillAnswer).kv_transfer_params)
    except msgspec.DecodeError as error:
        raise HandoffMissing(f"the prefill leg's answer is not the expected JSON: {error}") from None
    if raw == b"null":
        raise HandoffMissing("the prefill leg's answer has no kv_transfer_params: is a KV connector configured?")
    return raw


def decode_body(body: bytes, params: bytes) -> bytes:
    """The decode leg's body: the client's, with the prefill leg's `kv_transfer_params` as they came."""
    return with_fields(body, {"kv_transfer_params": msgspec.Raw(params)})
