"""A decision's inputs as plain values and back, so that a stored decision can be made again and compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from apps.planning.domain.capacity import BatchRange, NodeCapacity, Workload
from apps.planning.domain.cost_model import DecodeCoefficients, PrefillCoefficients
from apps.planning.domain.plan_types import LastSwitch, PlannerNode, PlannerPolicy, PlannerState, SliceView


def state_document(state: PlannerState) -> dict[str, Any]:
    """The state as plain values."""
    return asdict(state)


def state_from(document: Mapping[str, Any]) -> PlannerState:
    """Raises KeyError or TypeError for a document of another version."""
    last = document["last_switch"]
    return PlannerState(
        now=document["now"],
        nodes=tuple(_node_from(node) for node in document["nodes"]),
        policy=PlannerPolicy(**document["policy"]),
        last_switch=LastSwitch(**last) if last else None,
        switch_running=document["switch_running"],
        forced_reason=document["forced_reason"],
        warming_up=document["warming_up"],
    )


def slice_from(document: Mapping[str, Any]) -> SliceView:
    """A slice from its stored values."""
    workload = document["workload"]
    return SliceView(**{**document, "workload": Workload(**workload) if workload else None})


def _node_from(document: Mapping[str, Any]) -> PlannerNode:
    raw = document["capacity"]
    seen = raw["batch_range"]
    capacity = NodeCapacity(
        PrefillCoefficients(**raw["prefill"]),
        DecodeCoefficients(**raw["decode"]),
        raw["batch_limit"],
        BatchRange(**seen) if seen else None,
    )
    return PlannerNode(**{**document, "capacity": capacity})
