"""KV events of vLLM and of SGLang, which took over the format: decoded from either encoding into one form.

A message has the frames `[topic, sequence (8 bytes, big-endian), payload]`; the payload is msgpack `[ts, [event...], rank]`.
An event is a map with `type`, or in engines before mid-2026 an array that begins with its type's name. Block hashes are
bytes or integers; `medium` is compared without case. Source: the engines' own documentation of their event publishers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from apps.kvcache.domain.events import Tier

EngineHash: TypeAlias = "bytes | int"

_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
_REMOVED_FIELDS = ("block_hashes", "medium")
_DEVICE_MEDIA = frozenset(("gpu", "hbm", "device", "xpu", "tpu", "npu"))
SEQUENCE_BYTES = 8


class BadEvent(ValueError):
    """A message that is not in the expected form."""


@dataclass(frozen=True, slots=True)
class Stored:
    """`hashes[i]` is the block of `token_ids[i * block_tokens : (i + 1) * block_tokens]`. `plain`: nothing but the tokens
    decides its content (no LoRA, no images, no salt), so that a prompt of the same tokens can use it."""

    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    token_ids: Sequence[int]
    block_tokens: int
    tier: Tier
    plain: bool


@dataclass(frozen=True, slots=True)
class Removed:
    hashes: Sequence[EngineHash]
    tier: Tier


@dataclass(frozen=True, slots=True)
class Cleared:
    """The engine holds nothing any more."""


Event = Stored | Removed | Cleared


def decode_message(frames: Sequence[bytes]) -> tuple[int, list[Event]]:
    """Sequence number and events of one message; kinds that are not known are passed over. Raises BadEvent."""
    if len(frames) < 2 or len(frames[-2]) != SEQUENCE_BYTES:
        raise BadEvent(f"expected the frames topic, sequence, payload; got {len(frames)} frames")
    return int.from_bytes(frames[-2], "big"), decode_payload(frames[-1])


def decode_payload(payload: bytes) -> list[Event]:
    """The events of one batch. Raises BadEvent."""
    try:
        batch = msgspec.msgpack.decode(payload)
        events = batch["events"] if isinstance(batch, Mapping) else batch[1]
        return [event for event in map(_event, events) if event is not None]
    except BadEvent:
        raise
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise BadEvent(f"the batch is not in the expected form: {error}") from None


def _event(raw: Any) -> Event | None:
    if isinstance(raw, Mapping):
        kind, fields = raw["type"], raw
    else:
        kind = raw[0]
        names = {"BlockStored": _STORED_FIELDS, "BlockRemoved": _REMOVED_FIELDS}.get(kind, ())
        fields = dict(zip(names, raw[1:], strict=False))
    if kind == "BlockStored":
        return _stored(fields)
    if kind == "BlockRemoved":
        return Removed(_hashes(fields["block_hashes"]), _tier(fields.get("medium")))
    return Cleared() if kind == "AllBlocksCleared" else None


def _stored(fields: Mapping[str, Any]) -> Stored:
    hashes, ids, size = _hashes(fields["block_hashes"]), fields["token_ids"], fields["block_size"]
    if type(size) is not int or size < 1:
        raise BadEvent(f"block_size: expected a positive number, got {size!r}")
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 2**32 for token in ids):
        raise BadEvent("token_ids: expected a list of token ids")
    if len(ids) != len(hashes) * size:
        raise BadEvent(f"token_ids: expected {len(hashes)} blocks of {size}, got {len(ids)} ids")
    parent = fields.get("parent_block_hash")
    if parent is not None:
        (parent,) = _hashes([parent])
    extra = fields.get("extra_keys")
    plain = not (fields.get("lora_id") or fields.get("lora_name") or (extra and any(extra)))
    return Stored(hashes, parent, ids, size, _tier(fields.get("medium")), plain)


def _hashes(raw: Any) -> list[EngineHash]:
    if not isinstance(raw, list) or not all(isinstance(item, bytes) or type(item) is int for item in raw):
        raise BadEvent("block_hashes: expected a list of bytes or integers")
    return raw


def _tier(medium: Any) -> Tier:
    """Where a block lies; engines that do not say mean the device."""
    return "device" if medium is None or str(medium).lower() in _DEVICE_MEDIA else "host"
