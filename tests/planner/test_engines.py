"""Existing engines change phase: a vLLM pair by routing alone, SGLang by its own call, and what stands against it."""

import json
import time

import httpx
import pytest

from apps.planning import orders, services, windows
from apps.planning.domain.capacity import Workload
from apps.planning.domain.phase_machine import AgentUnreachable, PushAnswered, PushPhase, StatusReported, Tick
from apps.planning.models import SwitchOrder
from apps.topology import configuration
from apps.topology import services as topology
from apps.topology.models import Node
from controlplane.actors import SYSTEM
from controlplane.errors import Conflict
from tests.factories import COEFFICIENTS, MODEL, NETWORK, actor_with
from workers.planner import driving, engines, health, live_state, reach, simulating
from workers.planner.simulating import LiveState

pytestmark = pytest.mark.django_db
ADA = actor_with("administrator", "ada")


def make(kind, phases=("prefill", "decode"), **direct):
    cluster = topology.create_cluster("mine", SYSTEM)
    model = MODEL | {"tokenizer": "text", "ids_per_block": 64, "tokens_per_id": 1}
    partition = topology.create_partition(
        cluster, "mine", SYSTEM, model=model, network=NETWORK, gateway_url="http://127.0.0.1:8101"
    )
    for order, phase in enumerate(phases):
        topology.create_node(
            partition, f"e{order + 1}", SYSTEM, order=order, engine=kind, phase=phase, url=f"http://e{order + 1}:8000",
            hardware_class="unknown", coefficients=COEFFICIENTS, decode_limit=16, direct=direct,
        )  # fmt: skip
    configuration.publish(partition, SYSTEM, "made for a test")
    return partition


class Gateway:
    """What a gateway shows: it follows the published configuration, and sees roles that engines have of their own."""

    def __init__(self, partition, roles=None):
        self.partition, self.roles, self.running, self.away = partition, roles or {}, {}, False

    def __call__(self, partition=None):
        if self.away:
            return None
        nodes = configuration.latest(self.partition).document["nodes"]
        return {"nodes": [self._node(node) for node in nodes]}

    def _node(self, node):
        return {
            "name": node["name"], "phase": self.roles.get(node["name"], node["phase"]), "target_phase": node["phase"],
            "generation": node["generation"], "health": "ok", "state": "ready", "pool_capacity_blocks": 100,
            "running_decode": self.running.get(node["name"], 0),
        }  # fmt: skip


class Sglang:
    """A server's `/pd_role_switch` as SGLang 0.5.21 documents it."""

    def __init__(self, gateway, status=200, message="ok"):
        self.gateway, self.status, self.message, self.asked = gateway, status, message, []

    def __call__(self, request):
        name, body = request.url.host, json.loads(request.content)
        self.asked.append((name, request.url.path, body, request.headers.get("authorization")))
        if self.gateway.running.get(name):
            told = {"success": False, "message": "instance is not idle; drain all requests before switching"}
            return httpx.Response(400, json=told)
        if self.status != 200:
            return httpx.Response(self.status, json={"success": False, "message": self.message})
        old, self.gateway.roles[name] = self.gateway.roles[name], body["new_role"]
        return httpx.Response(
            200, json={"success": True, "message": "ok", "old_role": old, "new_role": body["new_role"]}
        )


@pytest.fixture
def world(monkeypatch):
    """A partition whose gateway and SGLang servers answer."""

    def build(kind, phases=("prefill", "decode"), **told):
        partition = make(kind, phases, **told.pop("direct", {}))
        roles = {f"e{index + 1}": phase for index, phase in enumerate(phases)} if kind == "sglang" else None
        gateway = Gateway(partition, roles)
        double = Sglang(gateway, **told)
        monkeypatch.setattr(reach, "live", gateway)
        made = httpx.Client
        monkeypatch.setattr(
            engines.httpx, "Client", lambda **options: made(transport=httpx.MockTransport(double), **options)
        )
        return partition, gateway, double

    return build


def force(partition, *prefill):
    services.force_split(partition, list(prefill), ADA, "for a test")
    return SwitchOrder.objects.filter(partition=partition).first()


def drive(order, budget_s=4.0):
    return driving.drive(order, budget_s)


def phases(partition):
    return {node.name: (node.desired_phase, node.draining) for node in Node.objects.filter(partition=partition)}


def test_a_vllm_pair_swaps_in_one_publication_and_nobody_drains(world):
    partition, _, double = world("vllm")
    order = force(partition, "e2")
    before = configuration.latest(partition).version
    assert drive(order) == "cooling"
    assert phases(partition) == {"e1": ("decode", False), "e2": ("prefill", False)}
    published = [
        {node["name"]: (node["phase"], node["generation"], node["draining"]) for node in version.document["nodes"]}
        for version in partition.configurations.filter(version__gt=before)
    ]
    assert published == [{"e1": ("decode", 1, False), "e2": ("prefill", 1, False)}]
    assert double.asked == []
    assert Node.objects.get(name="e2").observed_phase == "prefill"


def test_a_swap_waits_until_the_gateway_shows_it(world):
    partition, gateway, _ = world("vllm")
    order = force(partition, "e2")
    gateway.away = True
    assert drive(order, 1.5) == "draining"
    assert "gateway" in order.steps.first().reason
    gateway.away = False
    assert drive(order) == "cooling"


def test_sglang_is_told_its_role_once_it_is_idle(world, monkeypatch):
    monkeypatch.setenv("SGLANG_KEY", "secret")
    partition, gateway, double = world("sglang", ("prefill", "prefill", "decode"), direct={"token_env": "SGLANG_KEY"})
    order = force(partition, "e1")
    gateway.running["e2"] = 1
    assert drive(order, 1.5) == "draining"
    assert double.asked == []
    assert phases(partition)["e2"] == ("decode", True)
    gateway.running["e2"] = 0
    assert drive(order) == "cooling"
    assert double.asked == [("e2", "/pd_role_switch", {"new_role": "decode"}, "Bearer secret")]
    assert phases(partition)["e2"] == ("decode", False)
    step = order.steps.get()
    assert step.began_at < step.drained_at < step.finished_at


@pytest.mark.parametrize(
    ("status", "message", "says"),
    [
        (404, "Not Found", "older than SGLang 0.5.21"),
        (401, "Unauthorized", "refuses the key"),
        (400, "--enable-pd-role-switch is not set on this instance", "started without --enable-pd-role-switch"),
        (400, "transfer backend 'nixl' does not support runtime role switch", "transfer backend 'nixl'"),
        (400, "speculative decoding is not supported with role switch", "speculative decoding"),
        (400, "instance is unhealthy after a failed role switch; restart required", "restart required"),
    ],
)
def test_a_server_that_refuses_keeps_its_phase_and_the_order_says_why(world, status, message, says):
    partition, _, _ = world("sglang", ("prefill", "prefill", "decode"), status=status, message=message)
    order = force(partition, "e1")
    assert drive(order) == "failed"
    order.refresh_from_db()
    assert says in order.outcome
    assert phases(partition)["e2"] == ("prefill", False)


def test_a_server_that_is_still_busy_is_asked_again(world):
    _, gateway, double = world("sglang", ("prefill", "prefill", "decode"))
    nodes = list(Node.objects.filter(name="e2"))
    gateway.roles["e2"] = "decode"
    known = engines.Engines(nodes, gateway, 64)
    assert known.progress("e2").state == "switching"  # told first, asked next
    double.status, double.message = 400, "another role switch is already in progress"
    assert isinstance(known.progress("e2"), AgentUnreachable)
    assert known.progress("e2").state == "switching"  # not asked again within a second
    assert len(double.asked) == 1


def test_a_running_sglang_server_never_becomes_mixed(world):
    world("sglang", ("prefill", "prefill", "decode"))
    with pytest.raises(Conflict, match="restart it in the other mode"):
        services.force_node(Node.objects.get(name="e2"), "mixed", ADA, "for a test")
    answer = engines.Engines(list(Node.objects.all()), lambda: None, 64).push(PushPhase("e2", "mixed", 1, 60.0))
    assert isinstance(answer, PushAnswered)
    assert answer.code == "not-supported"


def test_what_the_gateway_sees_is_stored_as_the_nodes_state(world):
    partition, gateway, _ = world("vllm")
    health.observe(partition, 1_700_000_000.0)
    node = Node.objects.get(name="e1")
    assert (node.observed_phase, node.observed_state, node.observed_generation) == ("prefill", "ready", 0)
    gateway.away = True
    reports = health.observe(partition, 1_700_000_010.0)
    assert isinstance(reports["e1"], AgentUnreachable)
    node.refresh_from_db()
    assert node.observed_state == "down"


def test_nothing_is_told_again_to_engines_that_obey(world):
    partition, _, double = world("vllm")
    reports = health.observe(partition, 1_700_000_000.0)
    assert all(isinstance(said, StatusReported) for said in reports.values())
    assert health.heal(partition, reports) == []
    assert double.asked == []


def test_a_dry_run_takes_pool_and_limits_from_the_gateway(world):
    partition, _, _ = world("vllm")
    with reach.Reach(partition, list(Node.objects.all())) as nodes:
        said = nodes.document("e1")
    assert said["limits"] == {"kv_tokens": 6400, "prefill_chunk_tokens": 8192}


def test_a_node_that_must_be_idle_drains_first(world):
    partition, _, _ = world("sglang", ("prefill", "prefill", "decode"))
    order = force(partition, "e1")
    orders.advance(order.pk, order.ordered_at.timestamp(), Tick())
    assert phases(partition)["e2"] == ("decode", True)


# ---- what a switch costs -----------------------------------------------------------------------------------------------


def cost_s(partition, live, node="e2"):
    state = windows.planner_state(partition, time.time(), live)
    return next(entry.switch_s for entry in state.nodes if entry.name == node)


def test_a_switch_by_routing_costs_nothing(world):
    partition, gateway, _ = world("vllm")
    assert cost_s(partition, {"nodes": [{"name": "e2", "pool_referenced_blocks": 500}]}) == 0.0
    assert drive(force(partition, "e2")) == "cooling"
    assert cost_s(partition, gateway()) == 0.0


def test_sglangs_switch_costs_the_time_it_serves_nothing_and_the_context_it_loses(world):
    partition, _, _ = world("sglang", ("prefill", "prefill", "decode"))
    assert cost_s(partition, None) == windows.FIRST_ROLE_SWITCH_S
    lost = {"nodes": [{"name": "e2", "pool_referenced_blocks": 500}]}
    recompute_s = 500 * 64 * COEFFICIENTS["c1"]
    assert cost_s(partition, lost) == pytest.approx(windows.FIRST_ROLE_SWITCH_S + recompute_s)

    order = force(partition, "e1")
    assert drive(order) == "cooling"
    step = order.steps.get()
    measured_s = (step.finished_at - step.drained_at).total_seconds()
    assert 0 < measured_s < 4
    assert cost_s(partition, lost) == pytest.approx(measured_s + recompute_s)


def test_a_dry_run_simulates_engines_as_the_gateway_sees_them(world, monkeypatch):
    partition, gateway, _ = world("vllm", ("prefill", "decode", "decode"))
    monkeypatch.setattr(
        reach, "live", lambda _: {"nodes": [n | {"pool_capacity_blocks": 5000} for n in gateway()["nodes"]]}
    )
    for name in ("WARM_UP_REQUESTS", "SCORED_REQUESTS", "SHORTEST_S"):
        monkeypatch.setattr(simulating, name, 20)
    with reach.Reach(partition, list(Node.objects.all())) as nodes:
        documents = {node.name: nodes.document(node.name) for node in Node.objects.all()}
    workload = Workload(t_uc=900.0, pairs=2e6, t_rst=0.0, t_out=60.0, t_acc=2.2, u_tokens=8192.0, in_flight=6.0)
    limits = {name: live_state._limits_of(name, said) for name, said in documents.items()}
    document = configuration.latest(partition).document
    tenant = {"name": "t", "sharing_domain": "t", "weight": 1.0, "paused": False, "default_objective": "o"}
    document |= {
        "tenants": [tenant],
        "objectives": [{"name": "o", "band": "b"}],
        "bands": [{"name": "b", "priority": 0}],
    }
    state = LiveState(document, limits, workload, 640.0, 1.0, 0.5)
    found = simulating.compare(state, ["e1"], ["e1", "e2"])
    assert found["current"]["requests"] > 0
    assert found["candidate"]["requests"] > 0
