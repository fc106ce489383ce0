from __future__ import annotations

import pytest

from tests.flowcontrol.domain.driving import Cluster, flow_config


@pytest.fixture
def make_cluster():
    def make(answer_s: float | None = 2.0, nodes: int = 1, **fields) -> Cluster:
        return Cluster(flow_config(**fields), answer_s, nodes)

    return make
