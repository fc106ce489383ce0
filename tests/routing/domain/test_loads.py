from __future__ import annotations

import random

import pytest

from apps.routing.domain.loads import LoadBook
from apps.routing.domain.views import QueuedWork
from tests.routing.domain.building import NETWORK, facts

NODE = facts("n0", kv_capacity_tokens=1000)


@pytest.fixture
def book():
    book = LoadBook(NETWORK)
    yield book
    book.check_integrity()


def test_the_head_of_the_queue_runs_and_its_remaining_time_shrinks(book):
    book.placed_prefill(1.0, "a", "n0", QueuedWork(1000))
    book.placed_prefill(1.0, "b", "n0", QueuedWork(500))
    at_once, later = book.view(1.0, NODE), book.view(1.05, NODE)
    assert (at_once.running_prefill, at_once.queued) == (1, (QueuedWork(500),))
    assert at_once.running_remaining_s == pytest.approx(0.11)
    assert later.running_remaining_s == pytest.approx(0.06)
    assert book.view(9.0, NODE).running_remaining_s == 0.0, "late, but never negative"


def test_the_next_one_starts_when_the_head_finishes(book):
    book.placed_prefill(0.0, "a", "n0", QueuedWork(1000))
    book.placed_prefill(0.0, "b", "n0", QueuedWork(500))
    book.finished_prefill(5.0, "a")
    view = book.view(5.02, NODE)
    assert (view.prefill_requests, view.queued) == (1, ())
    assert view.running_remaining_s == pytest.approx(0.06 - 0.02)


def test_a_node_may_say_that_another_one_started_first(book):
    book.placed_prefill(0.0, "a", "n0", QueuedWork(1000))
    book.placed_prefill(0.0, "b", "n0", QueuedWork(500))
    book.started_prefill(2.0, "b")
    view = book.view(2.0, NODE)
    assert view.queued == (QueuedWork(1000),)
    assert view.running_remaining_s == pytest.approx(0.06)


def test_fetches_queue_on_the_link_and_drain_with_time(book):
    book.placed_prefill(0.0, "a", "n0", QueuedWork(10), fetch_tokens=1_000_000)
    book.placed_prefill(0.0, "b", "n0", QueuedWork(10), fetch_tokens=500_000)
    assert book.view(0.0, NODE).fetch_queue_bytes == pytest.approx(1.5e9)
    assert book.view(1.0, NODE).fetch_queue_bytes == pytest.approx(0.5e9)
    assert book.view(2.0, NODE).fetch_queue_bytes == 0.0


def test_an_announced_decode_takes_its_room_before_it_runs(book):
    book.announced_decode("a", "n0", 300)
    view = book.view(0.0, NODE)
    assert (view.announced_decode, view.running_decode, view.kv_free_tokens) == (1, 0, 700)
    book.started_decode("a")
    view = book.view(0.0, NODE)
    assert (view.announced_decode, view.running_decode, view.kv_free_tokens) == (0, 1, 700)
    book.finished(0.0, "a")
    assert book.view(0.0, NODE).kv_free_tokens == 1000


def test_placing_again_moves_a_request(book):
    book.placed_prefill(0.0, "a", "n0", QueuedWork(10))
    book.placed_prefill(1.0, "a", "n1", QueuedWork(10))
    book.announced_decode("a", "n0", 100)
    book.announced_decode("a", "n1", 100)
    view = book.view(1.0, NODE)
    assert (view.prefill_requests, view.decode_requests, view.kv_used_tokens) == (0, 0, 0)
    assert (book.prefill_node("a"), book.decode_node("a")) == ("n1", "n1")


def test_a_lost_node_names_everybody_placed_on_it(book):
    book.placed_prefill(0.0, "a", "n0", QueuedWork(10))
    book.announced_decode("a", "n1", 100)
    book.announced_decode("b", "n0", 100)
    book.started_decode("b")
    assert book.node_lost(1.0, "n0") == ["a", "b"]
    assert (book.prefill_node("a"), book.decode_node("a"), book.decode_node("b")) == (None, "n1", None)
    assert book.node_lost(1.0, "n0") == []


def test_reports_about_unknown_requests_change_nothing(book):
    book.finished_prefill(0.0, "x")
    book.started_prefill(0.0, "x")
    book.started_decode("x")
    book.finished(0.0, "x")
    assert book.view(0.0, NODE).prefill_requests == 0


def test_random_placements_leave_nothing_behind(book):
    rng = random.Random(7)
    for step in range(3000):
        name, node, now = f"r{rng.randrange(40)}", f"n{rng.randrange(4)}", float(step)
        call = rng.randrange(7)
        if call <= 1:
            book.placed_prefill(now, name, node, QueuedWork(rng.randrange(1, 99)))
        elif call == 2:
            book.announced_decode(name, node, rng.randrange(99))
        elif call == 3:
            book.started_decode(name)
        elif call == 4:
            book.finished_prefill(now, name)
        elif call == 5:
            book.finished(now, name)
        else:
            book.started_prefill(now, name)
        if rng.random() < 0.02:
            book.node_lost(now, node)
        book.check_integrity()
    for index in range(40):
        book.finished(3000.0, f"r{index}")
    for index in range(4):
        view = book.view(3000.0, facts(f"n{index}"))
        assert (view.prefill_requests, view.decode_requests, view.kv_used_tokens) == (0, 0, 0)
