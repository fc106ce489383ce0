import json

import pytest

from bench import flow


def test_every_number_is_told_beside_a_plain_heap(monkeypatch, capsys):
    small = {"PASSES": 200, "BACKLOG": 50, "IDLE_FLOWS": 20, "MANY": 30, "ROUNDS": 1}
    for name, number in small.items():
        monkeypatch.setattr(flow, name, number)
    plain: list[int] = []
    heap = flow.heap_passes_s
    monkeypatch.setattr(flow, "heap_passes_s", lambda waiting: plain.append(waiting) or heap(waiting) + 1e-9)
    flow.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 9
    assert all(
        line["baseline"] and line["ratio"] == pytest.approx(line["value"] / line["baseline"], rel=1e-3)
        for line in lines
    )
    idle = [line for line in lines if "idle" in line["name"]]
    assert len(idle) == 3 and len({line["baseline"] for line in idle}) == 1
    assert all(line["met"] is not None for line in idle)
    assert plain == [flow.FEW, 30, flow.FEW]
