"""The live snapshot has exactly the fields that docs/interfaces.md, section 9, promises, and is JSON at any moment."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.yard.scene import Scene
from workers.yard import events

PERCENTILES = {"p50", "p95", "p99", "n"}
FIELDS = {
    "": "v partition t seq config_version config_error gateway verdict split nodes bands stages latency throughput reuse "
    "requests recent",
    "gateway": "started_at degraded",
    "verdict": "level stage reason",
    "split": "prefill decode mixed down",
    "nodes[]": "name phase target_phase state generation health age_s running_prefill queued_prefill queued_tokens "
    "predicted_wait_s running_decode announced_decode decode_limit pool_used_blocks pool_capacity_blocks "
    "pool_referenced_blocks last_switch",
    "bands[]": "name priority waiting waiting_bytes oldest_s expected_wait_s dispatched_per_s dispatched_total dropped flows",
    "bands[].flows[]": "id waiting oldest_s dispatched_total",
    "stages": "prefill decode",
    "latency": "window_s ttft_s e2e_s tpot_s queue_s ttft_error_ratio",
    "throughput": "requests_per_s prompt_tokens_per_s computed_tokens_per_s output_tokens_per_s",
    "reuse": "prompt_tokens ideal_tokens actual_tokens lost branches_live",
    "reuse.lost": "evicted routed switched fetch-failed never-stored",
    "requests": "arrived dispatched completed failed dropped cancelled waiting running",
    "recent[]": "id t tenant band branch prefill_node decode_node prompt_tokens cached_tokens output_tokens queue_s ttft_s "
    "predicted_ttft_s e2e_s outcome reason",
}


def at(document: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """Every object at a path such as `bands[].flows[]`."""
    found: list[Any] = [document]
    for part in filter(None, path.split(".")):
        name = part.removesuffix("[]")
        found = [item[name] for item in found]
        if part.endswith("[]"):
            found = [item for items in found for item in items]
    return found


@pytest.fixture
def snapshot() -> dict[str, Any]:
    """Some requests done, some running, some waiting, one dropped, one node lost."""
    scene = Scene({"p1": "prefill", "d1": "decode", "d2": "decode"})
    for n in range(4):
        scene.arrive(f"r{n}", "premium" if n % 2 else "standard", ttl_s=4.0 if n == 3 else None)
    scene.now += 0.5
    scene.feed(events.FirstToken("r0"))
    scene.prefilled("r0")
    scene.decoded("r0", 49)
    scene.now += 1.0
    scene.done("r0", 50)
    scene.wait(7.0, silent=("d2",))
    return scene.yard.snapshot(scene.now)


@pytest.mark.parametrize("path", FIELDS, ids=lambda path: path or "top")
def test_every_part_has_the_promised_fields(snapshot: dict[str, Any], path: str) -> None:
    objects = at(snapshot, path)
    assert objects, f"nothing to check at {path}"
    for item in objects:
        missing = set(FIELDS[path].split()) - set(item)
        assert not missing, f"{path} lacks {sorted(missing)}"


def test_it_is_json_without_infinities_even_without_any_node() -> None:
    scene = Scene()
    scene.wait(10.0, silent=("p1", "p2", "d1", "d2"))
    scene.arrive("r")
    text = json.dumps(scene.yard.snapshot(scene.now), allow_nan=False)
    assert json.loads(text)["stages"]["prefill"]["saturation"] is None
    assert json.loads(text)["verdict"] == {
        "level": "down",
        "stage": "prefill",
        "reason": "no healthy node takes prefill",
    }


def test_it_counts_what_happened(snapshot: dict[str, Any]) -> None:
    requests = snapshot["requests"]
    assert (requests["arrived"], requests["completed"], requests["dropped"]) == (4, 1, 1)
    assert requests["waiting"] + requests["running"] == 2
    done = next(row for row in snapshot["recent"] if row["id"] == "r0")
    assert (done["ttft_s"], done["e2e_s"], done["output_tokens"]) == (0.5, 1.5, 50)
    assert snapshot["latency"]["ttft_s"] == {"p50": 0.5, "p95": 0.5, "p99": 0.5, "n": 1}
    assert snapshot["verdict"] == {"level": "degraded", "stage": None, "reason": "down: d2"}
    premium = next(band for band in snapshot["bands"] if band["name"] == "premium")
    assert premium["dropped"] == {"rejected-ttl-expired": 1}


def test_the_number_goes_up_and_reading_changes_nothing_else() -> None:
    scene = Scene()
    scene.arrive("r")
    first, second = (scene.yard.snapshot(scene.now) for _ in range(2))
    assert second["seq"] == first["seq"] + 1
    assert first | {"seq": 0} == second | {"seq": 0}


@pytest.mark.parametrize(("answers", "level"), [(20, "degraded"), (19, "fine")])
def test_latency_over_its_target_is_no_fine_yard(answers: int, level: str) -> None:
    scene = Scene(slo={"ttft_s": 1.0})
    for n in range(answers):
        scene.arrive(f"r{n}")
        scene.wait(1.2)
        scene.feed(events.FirstToken(f"r{n}"))
        scene.prefilled(f"r{n}")
        scene.done(f"r{n}", 1)
        scene.wait(0.1)
    verdict = scene.yard.snapshot(scene.now)["verdict"]
    assert verdict["level"] == level
    if level == "degraded":
        assert verdict == {
            "level": "degraded",
            "stage": "prefill",
            "reason": "TTFT p95 is 1.2 s, over its target of 1 s",
        }
