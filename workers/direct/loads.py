"""What an engine says of its load: vLLM and SGLang in Prometheus text (`/metrics`), SGLang also as JSON (`/v1/loads`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

_SAMPLE = re.compile(rb"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{([^}]*)\})?[ \t]+(\S+)", re.MULTILINE)
_LABEL = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
NAMES = {
    "vllm": {
        "running": (b"vllm:num_requests_running",),
        "waiting": (b"vllm:num_requests_waiting",),
        "kv_used_ratio": (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),
        "config": (b"vllm:cache_config_info",),
    },
    "sglang": {
        "running": (b"sglang:num_running_reqs",),
        "waiting": (b"sglang:num_queue_reqs",),
        "kv_used_ratio": (b"sglang:token_usage",),
        "config": (),
    },
}


class BadLoad(ValueError):
    """An answer that is not in the expected form."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """`kv_tokens`: how many tokens the device holds in all (0: not said). `prefill_*` and `decode_*`: totals since the
    engine's start; `decode_requests` is the sum of all steps' batch sizes. None where the engine does not tell."""

    running: int
    waiting: int
    kv_used_ratio: float
    kv_tokens: int = 0
    max_running: int = 0
    waiting_tokens: int = 0
    prefill_uncached_tokens: float | None = None
    prefill_busy_s: float | None = None
    decode_steps: float | None = None
    decode_requests: float | None = None
    decode_busy_s: float | None = None


def from_metrics(kind: str, text: bytes) -> EngineLoad:
    """From Prometheus text; several ranks or models are added up. Raises BadLoad when the engine's names are missing."""
    names = NAMES[kind]
    found: dict[bytes, list[float]] = {}
    kv_tokens = 0
    for name, labels, value in _samples(text):
        found.setdefault(name, []).append(value)
        if name in names["config"]:
            kv_tokens += _config_tokens(labels)
    running, waiting = _first(found, names["running"]), _first(found, names["waiting"])
    if running is None or waiting is None:
        raise BadLoad(f"/metrics has no {names['running'][0].decode()}: is this a {kind} server with metrics on?")
    used = _first(found, names["kv_used_ratio"]) or [0.0]
    return EngineLoad(int(sum(running)), int(sum(waiting)), min(1.0, max(used)), kv_tokens)


def from_loads(text: bytes) -> EngineLoad:
    """From SGLang's `/v1/loads`; its data-parallel ranks are added up. Raises BadLoad."""
    try:
        answer = msgspec.json.decode(text)
        ranks: list[dict[str, Any]] = answer["loads"]
        return EngineLoad(
            running=sum(int(rank["num_running_reqs"]) for rank in ranks),
            waiting=sum(int(rank["num_waiting_reqs"]) for rank in ranks),
            kv_used_ratio=max((float(rank.get("token_usage", 0.0)) for rank in ranks), default=0.0),
            kv_tokens=sum(int(rank.get("max_total_num_tokens", 0)) for rank in ranks),
            max_running=sum(int(rank.get("max_running_requests", 0)) for rank in ranks),
            waiting_tokens=sum(int(rank.get("num_waiting_uncached_tokens", 0)) for rank in ranks),
            prefill_uncached_tokens=_total(ranks, "total_prefill_uncached_tokens", 1.0),
            prefill_busy_s=_total(ranks, "total_prefill_busy_us", 1e-6),
            decode_steps=_moment(ranks, 0, 1.0),
            decode_requests=_moment(ranks, 1, 1.0),
            decode_busy_s=_moment(ranks, 2, 1e-6),
        )
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise BadLoad(f"/v1/loads is not in the expected form: {error}") from None


def _total(ranks: list[dict[str, Any]], name: str, scale: float) -> float | None:
    values = [float(rank[name]) for rank in ranks if name in rank]
    return sum(values) * scale if values else None


def _moment(ranks: list[dict[str, Any]], index: int, scale: float) -> float | None:
    """One of `decode_moments`: steps, sum of batch sizes, sum of step times in microseconds, ..."""
    values = [float(rank["decode_moments"][index]) for rank in ranks if rank.get("decode_moments")]
    return sum(values) * scale if values else None


def _samples(text: bytes) -> Iterator[tuple[bytes, bytes, float]]:
    for match in _SAMPLE.finditer(text):
        try:
            yield match[1], match[2] or b"", float(match[3])
        except ValueError:
            continue


def _first(found: dict[bytes, list[float]], names: tuple[bytes, ...]) -> list[float] | None:
    return next((found[name] for name in names if name in found), None)


def _config_tokens(labels: bytes) -> int:
    """vLLM tells the size of its cache by the labels of an info metric."""
    values = {match[1]: match[2] for match in _LABEL.finditer(labels)}
    try:
        return int(values[b"num_gpu_blocks"]) * int(values[b"block_size"])
    except (KeyError, ValueError):
        return 0
