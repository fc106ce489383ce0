"""The phase machine: orders, draining, deadlines, generations."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.agent.phase import PhaseMachine, PhaseRecord, PhaseRefused, StageName, load_record, save_record

IDLE: dict[StageName, int] = {"prefill": 0, "decode": 0}
PREFILLING: dict[StageName, int] = {"prefill": 2, "decode": 0}
DECODING: dict[StageName, int] = {"prefill": 0, "decode": 1}


def refusal(machine: PhaseMachine, stage: str, generation: int | None = None) -> str | None:
    try:
        machine.admit(stage, generation)  # type: ignore[arg-type]
    except PhaseRefused as refused:
        return refused.code
    return None


def test_an_idle_node_switches_at_once() -> None:
    machine = PhaseMachine("prefill", 3)
    assert machine.order(10.0, "decode", 4, 60.0)
    assert machine.advance(10.0, IDLE) == "decode"
    assert machine.state == "switching"
    machine.switched(10.5, "decode")
    assert (machine.phase, machine.state, machine.generation) == ("decode", "ready", 4)
    assert machine.last_switch is not None and machine.last_switch.duration_s == 0.5


def test_old_work_is_drained_before_the_switch() -> None:
    machine = PhaseMachine("prefill", 0)
    machine.order(10.0, "decode", 1, 60.0)
    assert machine.advance(10.0, PREFILLING) is None
    assert (machine.phase, machine.state, machine.target) == ("prefill", "draining", "decode")
    assert refusal(machine, "prefill") == "draining"
    assert refusal(machine, "decode") == "wrong-phase"
    assert machine.advance(12.0, IDLE) == "decode"


def test_at_the_deadline_the_node_is_mixed_until_old_work_ends() -> None:
    machine = PhaseMachine("decode", 0)
    machine.order(10.0, "prefill", 1, 5.0)
    machine.advance(10.0, DECODING)
    assert machine.next_deadline() == 15.0
    assert machine.advance(15.0, DECODING) is None
    assert (machine.phase, machine.state) == ("mixed", "draining")
    assert refusal(machine, "prefill") is None, "new work of the new phase is taken"
    assert refusal(machine, "decode") == "draining"
    assert machine.next_deadline() is None
    assert machine.advance(20.0, PREFILLING) == "prefill", "work of the new phase does not hold the switch up"


def test_repeating_an_order_changes_nothing() -> None:
    machine = PhaseMachine("prefill", 0)
    assert machine.order(10.0, "decode", 1, 60.0)
    assert not machine.order(11.0, "decode", 1, 60.0)


@pytest.mark.parametrize(("phase", "generation"), [("decode", 4), ("mixed", 5)])
def test_older_and_contradicting_orders_are_stale(phase: str, generation: int) -> None:
    machine = PhaseMachine("decode", 5)
    with pytest.raises(PhaseRefused) as refused:
        machine.order(0.0, phase, generation, 60.0)  # type: ignore[arg-type]
    assert refused.value.code == "stale-generation"
    assert (machine.phase, machine.generation) == ("decode", 5)


def test_work_sent_with_an_old_generation_is_refused_and_with_none_or_a_newer_one_taken() -> None:
    machine = PhaseMachine("prefill", 5)
    assert refusal(machine, "prefill", 4) == "stale-generation"
    assert [refusal(machine, "prefill", generation) for generation in (None, 5, 6)] == [None, None, None]


def test_an_order_taken_back_while_draining_returns_without_a_switch() -> None:
    machine = PhaseMachine("prefill", 0)
    machine.order(0.0, "decode", 1, 60.0)
    machine.advance(0.0, PREFILLING)
    machine.order(1.0, "prefill", 2, 60.0)
    assert (machine.phase, machine.state, machine.generation) == ("prefill", "ready", 2)
    assert machine.last_switch is None
    assert refusal(machine, "prefill") is None


def test_an_order_that_comes_while_switching_is_carried_out_afterwards() -> None:
    machine = PhaseMachine("prefill", 0)
    machine.order(0.0, "decode", 1, 60.0)
    assert machine.advance(0.0, IDLE) == "decode"
    machine.order(0.1, "prefill", 2, 60.0)
    machine.switched(0.2, "decode")
    assert (machine.phase, machine.state, machine.target) == ("decode", "draining", "prefill")
    assert machine.advance(0.2, IDLE) == "prefill"


def test_a_mixed_node_keeps_taking_the_stage_it_stays_in() -> None:
    machine = PhaseMachine("mixed", 0)
    machine.order(0.0, "decode", 1, 60.0)
    machine.advance(0.0, PREFILLING)
    assert refusal(machine, "decode") is None
    assert refusal(machine, "prefill") == "draining"


def test_the_record_survives_and_a_broken_one_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "nodes" / "n" / "phase.json"
    assert load_record(path) is None
    save_record(path, PhaseRecord("decode", 7))
    assert load_record(path) == PhaseRecord("decode", 7)
    for text in ("", "{}", '{"phase": "sideways", "generation": 1}', '{"phase": "decode", "generation": "1"}'):
        path.write_text(text)
        assert load_record(path) is None
