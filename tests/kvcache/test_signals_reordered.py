"""Signals that come twice, late or in another order leave the branches as they would be in order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from apps.kvcache.domain import events as ev
from apps.kvcache.domain.machine import KvMachine
from tests.kvcache.kit import chain_of, prompt_of


def story(steps: list[tuple[str, int]]) -> list[tuple[list[int], ev.BranchSignal]]:
    """Requests of two branches, each numbered within its branch; a compaction raises the version."""
    contexts = {"a": [1, 2, 3], "b": [1, 2, 9]}
    versions, sequences = {"a": 0, "b": 0}, {"a": 0, "b": 0}
    requests = []
    for number, (what, who) in enumerate(steps):
        branch = "ab"[who]
        if what == "compact":
            versions[branch] += 1
            contexts[branch] = [1, 2, 100 + number]
        else:
            contexts[branch] = [*contexts[branch], 200 + number]
        sequences[branch] += 1
        signal = ev.BranchSignal(branch, version=versions[branch], sequence=sequences[branch], tenant="t")
        requests.append((list(contexts[branch]), signal))
    return requests


def played(requests: list[tuple[list[int], ev.BranchSignal]]) -> dict[str, tuple[int, int | None, int]]:
    machine = KvMachine()
    for branch in ("a", "b"):
        machine.handle(
            0.0,
            ev.RequestSeen(
                f"first-{branch}", ev.BranchSignal(branch, version=0, sequence=0, tenant="t"), prompt_of([1])
            ),
        )
        machine.handle(0.0, ev.OutputStored(f"first-{branch}", b""))
    for number, (ids, signal) in enumerate(requests):
        machine.handle(1.0, ev.RequestSeen(f"r{number}", signal, prompt_of(ids)))
        machine.check_integrity()
        machine.handle(1.0, ev.OutputStored(f"r{number}", b""))
    machine.check_integrity()
    found = {}
    for branch in ("a", "b"):
        view = machine.branch(branch)
        assert view is not None
        found[branch] = (view.version, view.sequence, view.context_blocks)
    return found


STEPS = st.lists(st.tuples(st.sampled_from(["go on", "go on", "compact"]), st.integers(0, 1)), min_size=1, max_size=12)


@settings(max_examples=120, deadline=None)
@given(steps=STEPS, data=st.data())
def test_order_and_repeats_make_no_difference(steps: list[tuple[str, int]], data: st.DataObject) -> None:
    requests = story(steps)
    repeats = data.draw(st.lists(st.sampled_from(requests), max_size=6))
    shuffled = data.draw(st.permutations([*requests, *repeats]))
    assert played(shuffled) == played(requests)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, again=st.integers(1, 3))
def test_an_end_stays_an_end_however_often_what_came_before_is_repeated(
    steps: list[tuple[str, int]], again: int
) -> None:
    requests = [(ids, signal) for ids, signal in story(steps) if signal.branch_id == "a"]
    machine = KvMachine()
    for number, (ids, signal) in enumerate(requests):
        machine.handle(1.0, ev.RequestSeen(f"r{number}", signal, prompt_of(ids)))
        machine.handle(1.0, ev.OutputStored(f"r{number}", chain_of([*ids, 7])[16 * len(ids) :]))
    for _ in range(2):
        machine.handle(2.0, ev.BranchEnded("a"))
    for repeat in range(again):
        for number, (ids, signal) in enumerate(requests):
            machine.handle(3.0, ev.RequestSeen(f"late-{repeat}-{number}", signal, prompt_of(ids)))
            machine.handle(3.0, ev.OutputStored(f"late-{repeat}-{number}", b""))
    assert machine.branches_live == 0
    machine.check_integrity()


@settings(max_examples=40, deadline=None)
@given(times=st.integers(1, 4), rewritten=st.booleans())
def test_an_announcement_may_be_repeated(times: int, rewritten: bool) -> None:
    machine = KvMachine()
    said = ev.BranchAnnounced("child", parent="main", relation="fork", program="p", rewritten=rewritten)
    for _ in range(times):
        machine.handle(0.0, said)
    machine.handle(1.0, ev.RequestSeen("r", ev.BranchSignal("child"), prompt_of([1, 2])))
    for _ in range(times):
        machine.handle(2.0, said)
    view = machine.branch("child")
    assert view is not None and (view.kind, view.parent, view.program) == ("fork", "main", "p")
    machine.check_integrity()
