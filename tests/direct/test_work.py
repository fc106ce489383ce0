"""Rows for the cost model out of an engine's totals."""

import json

import pytest

from apps.planning.domain.cost_model import pairs
from tests.direct.engine import Engine
from tests.direct.test_node import last, world
from workers.direct.loads import EngineLoad, from_loads
from workers.direct.work import Work
from workers.yard import events


def load(tokens=0, prefill_s=0.0, steps=0, requests=0, decode_s=0.0):
    return EngineLoad(0, 0, 0.0, 0, 0, 0, tokens, prefill_s, steps, requests, decode_s)


def test_the_first_totals_tell_of_a_time_nobody_saw():
    work = Work()
    assert work.rows(load(5000, 1.0, 10, 20, 0.5)) == []


def test_prefill_is_told_by_tokens_and_busy_time_and_what_we_sent():
    work = Work()
    work.rows(load(1000, 1.0))
    work.prefilled(300)
    work.prefilled(500)
    (row,) = work.rows(load(1600, 1.25))
    assert row == ["prefill", 600, 2 * pairs(300, 100), 0, 2, 0.25, 2, 2]
    assert work.rows(load(1600, 1.25)) == []


def test_decode_is_told_by_steps_with_their_mean_batch():
    work = Work()
    work.rows(load(steps=100, requests=400, decode_s=2.0))
    assert work.rows(load(steps=150, requests=700, decode_s=3.0)) == [["decode", 0, 0.0, 0, 6, 1.0, 0, 50]]


def test_totals_that_went_back_are_another_process_and_tell_nothing():
    work = Work()
    work.rows(load(1000, 1.0, 100, 400, 2.0))
    assert work.rows(load(10, 0.1, 1, 1, 0.1)) == []
    assert len(work.rows(load(20, 0.2, 2, 2, 0.2))) == 2


def test_an_engine_without_totals_gives_no_rows():
    work = Work()
    work.rows(EngineLoad(1, 0, 0.0))
    work.prefilled(100)
    assert work.rows(EngineLoad(2, 0, 0.0)) == []


def test_decode_moments_of_all_ranks_are_added_up():
    rank = {"num_running_reqs": 1, "num_waiting_reqs": 0, "decode_moments": [2, 30, 3000, 500, 50_000, 60]}
    told = from_loads(json.dumps({"loads": [rank, rank, rank | {"decode_moments": None}]}).encode())
    assert (told.decode_steps, told.decode_requests, told.decode_busy_s) == (4, 60, 0.006)


async def test_what_sglang_worked_comes_with_its_status(monkeypatch):
    def told(tokens, busy_us, moments):
        rank = {"num_running_reqs": 1, "num_waiting_reqs": 0, "max_total_num_tokens": 6400, "decode_moments": moments}
        return 200, json.dumps(
            {"loads": [rank | {"total_prefill_uncached_tokens": tokens, "total_prefill_busy_us": busy_us}]}
        ).encode()

    engine = Engine("sglang")
    engine.answers["/v1/loads"] = told(1000, 500_000, [10, 40, 100_000, 0, 0, 40])
    async with world(engine, monkeypatch) as (node, heard):
        await last(heard, events.NodeStatus)
        node.served(bytes(16) * 10)
        engine.answers["/v1/loads"] = told(1600, 600_000, [30, 140, 300_000, 0, 0, 140])
        (name, rows) = (await last(heard, events.NodeStatuses)).worked[0]
    assert name == "v1"
    assert [row[:2] + row[4:] for row in rows] == [
        ["prefill", 600, 1, pytest.approx(0.1), 1, 1],
        ["decode", 0, 5, pytest.approx(0.2), 0, 20],
    ]
