"""Every operation of the API with a call that works: who may make it, and what it answers.

Names in braces in an address stand for rows that `tests/api/conftest.py` makes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LATER = "2099-01-01T00:00:00Z"
WHY = {"reason": "a test"}
LOWER = {"viewer": "tenant", "operator": "viewer", "administrator": "operator"}
GATEWAY = "/partitions/gb300"
SPLIT = "/split/gb300"
IMPORTED = """
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: nightly}
spec: {priority: -50}
"""
APPLIED = """
apiVersion: switchyard/v1
kind: Tenant
metadata: {name: acme}
spec: {weight: 3}
"""


@dataclass(frozen=True)
class Operation:
    """`name` is the operation's id in the OpenAPI document; `role` the lowest that may call it."""

    name: str
    method: str
    path: str
    role: str
    body: Any = None
    status: int = 200
    unknown: tuple[str, ...] = field(default=())
    """The same address with a name that does not exist."""

    def __str__(self) -> str:
        return self.name


def _read(name: str, path: str, *unknown: str) -> Operation:
    return Operation(name, "get", path, "viewer", unknown=unknown)


OPERATIONS = [
    Operation("who_am_i", "get", "/me", ""),
    # tenancy
    _read("list_tenants", "/tenants"),
    Operation("create_tenant", "post", "/tenants", "administrator", {"name": "umbrella"}, 201),
    _read("get_tenant", "/tenants/acme", "/tenants/nobody"),
    Operation("edit_tenant", "patch", "/tenants/acme", "operator", {"weight": 2}, unknown=("/tenants/nobody",)),
    Operation("pause_tenant", "post", "/tenants/acme/pause", "operator", WHY, unknown=("/tenants/nobody/pause",)),
    Operation("resume_tenant", "post", "/tenants/acme/resume", "operator", WHY, unknown=("/tenants/nobody/resume",)),
    _read("list_keys", "/tenants/acme/keys", "/tenants/nobody/keys"),
    Operation(
        "issue_key",
        "post",
        "/tenants/acme/keys",
        "administrator",
        {"name": "new"},
        201,
        ("/tenants/nobody/keys",),
    ),
    Operation("rotate_key", "post", "/keys/{key}/rotate", "administrator", WHY, 201, ("/keys/999999999/rotate",)),
    Operation("revoke_key", "post", "/keys/{key}/revoke", "administrator", WHY, 200, ("/keys/999999999/revoke",)),
    _read("list_members", "/tenants/acme/members", "/tenants/nobody/members"),
    Operation(
        "add_member",
        "post",
        "/tenants/acme/members",
        "administrator",
        {"username": "admin"},
        201,
        ("/tenants/nobody/members",),
    ),
    Operation(
        "remove_member",
        "delete",
        "/tenants/acme/members/{member}",
        "administrator",
        None,
        204,
        ("/tenants/acme/members/nobody", "/tenants/nobody/members/x"),
    ),
    # topology
    _read("list_clusters", "/clusters"),
    _read("get_cluster", "/clusters/gb300", "/clusters/nowhere"),
    _read("list_partitions", "/partitions"),
    _read("get_partition", "/partitions/gb300", "/partitions/nowhere"),
    Operation(
        "edit_partition",
        "patch",
        "/partitions/gb300",
        "administrator",
        {"routing_policy": "sticky"},
        unknown=("/partitions/nowhere",),
    ),
    _read("list_nodes", f"{GATEWAY}/nodes", "/partitions/nowhere/nodes"),
    Operation(
        "add_node",
        "post",
        "/partitions/gb300/nodes",
        "administrator",
        {"name": "gb300-5", "url": "http://h:1/nodes/gb300-5", "engine": "simulated", "phase": "decode"},
        201,
        unknown=("/partitions/nobody/nodes",),
    ),
    _read("get_node", "/nodes/gb300-1", "/nodes/nowhere"),
    Operation("edit_node", "patch", "/nodes/gb300-1", "operator", {"decode_limit": 7}, unknown=("/nodes/nowhere",)),
    Operation("delete_node", "delete", "/nodes/{unused}", "administrator", None, 204, unknown=("/nodes/nowhere",)),
    Operation("drain_node", "post", "/nodes/gb300-1/drain", "operator", WHY, unknown=("/nodes/nowhere/drain",)),
    Operation("undrain_node", "post", "/nodes/gb300-1/undrain", "operator", WHY, unknown=("/nodes/nowhere/undrain",)),
    _read("list_configurations", f"{GATEWAY}/configurations", "/partitions/nowhere/configurations"),
    _read(
        "get_configuration",
        f"{GATEWAY}/configurations/{{version}}",
        f"{GATEWAY}/configurations/999999",
        "/partitions/nowhere/configurations/1",
    ),
    # flow control
    _read("get_queues", f"{GATEWAY}/queues", "/partitions/nowhere/queues"),
    _read("list_bands", f"{GATEWAY}/bands", "/partitions/nowhere/bands"),
    Operation(
        "create_band",
        "post",
        f"{GATEWAY}/bands",
        "operator",
        {"name": "bulk", "priority": -5},
        201,
        ("/partitions/nowhere/bands",),
    ),
    Operation(
        "set_priorities",
        "put",
        f"{GATEWAY}/band-priorities",
        "operator",
        {"priorities": {"premium": 0, "standard": 100}},
        unknown=("/partitions/nowhere/band-priorities",),
    ),
    _read("get_band", f"{GATEWAY}/bands/premium", f"{GATEWAY}/bands/nope", "/partitions/nowhere/bands/premium"),
    Operation(
        "edit_band",
        "patch",
        f"{GATEWAY}/bands/premium",
        "operator",
        {"priority": 7},
        unknown=(f"{GATEWAY}/bands/nope", "/partitions/nowhere/bands/premium"),
    ),
    Operation(
        "delete_band", "delete", f"{GATEWAY}/bands/spare", "operator", None, 204, unknown=(f"{GATEWAY}/bands/nope",)
    ),
    _read("list_objectives", f"{GATEWAY}/objectives", "/partitions/nowhere/objectives"),
    Operation(
        "create_objective",
        "post",
        f"{GATEWAY}/objectives",
        "operator",
        {"name": "chat", "band": "premium", "slo_ttft_s": 2},
        201,
        ("/partitions/nowhere/objectives",),
    ),
    _read("get_objective", f"{GATEWAY}/objectives/premium", f"{GATEWAY}/objectives/nope"),
    Operation(
        "edit_objective",
        "patch",
        f"{GATEWAY}/objectives/premium",
        "operator",
        {"ttl_s": 5},
        unknown=(f"{GATEWAY}/objectives/nope",),
    ),
    Operation(
        "delete_objective",
        "delete",
        f"{GATEWAY}/objectives/premium",
        "operator",
        None,
        204,
        (f"{GATEWAY}/objectives/nope",),
    ),
    _read("get_flow_settings", f"{GATEWAY}/flow-settings", "/partitions/nowhere/flow-settings"),
    Operation(
        "edit_flow_settings",
        "patch",
        f"{GATEWAY}/flow-settings",
        "operator",
        {"prefill": {"limit_per_node": 9}},
        unknown=("/partitions/nowhere/flow-settings",),
    ),
    _read("export_flow_config", f"{GATEWAY}/flow-config", "/partitions/nowhere/flow-config"),
    Operation(
        "import_flow_config",
        "post",
        f"{GATEWAY}/flow-config/import",
        "operator",
        {"yaml": IMPORTED, "dry_run": True},
        unknown=("/partitions/nowhere/flow-config/import",),
    ),
    Operation(
        "revert_flow_config",
        "post",
        f"{GATEWAY}/flow-config/revert",
        "operator",
        {"version": 1, "dry_run": True},
        unknown=("/partitions/nowhere/flow-config/revert",),
    ),
    _read("export_documents", f"{GATEWAY}/manifests", "/partitions/nowhere/manifests"),
    Operation("apply_documents", "post", "/apply", "operator", {"yaml": APPLIED, "partition": "gb300"}),
    # telemetry
    _read("get_live", f"{GATEWAY}/live", "/partitions/nowhere/live"),
    _read("list_requests", f"{GATEWAY}/requests", "/partitions/nowhere/requests"),
    _read("get_request_sums", f"{GATEWAY}/request-sums", "/partitions/nowhere/request-sums"),
    _read("get_request", f"{GATEWAY}/requests/r-1", f"{GATEWAY}/requests/r-999", "/partitions/nowhere/requests/r-1"),
    Operation("get_reuse", "get", f"{GATEWAY}/reuse", "viewer", status=503, unknown=("/partitions/nowhere/reuse",)),
    Operation(
        "list_branches", "get", f"{GATEWAY}/branches", "viewer", status=503, unknown=("/partitions/nowhere/branches",)
    ),
    Operation(
        "get_branch",
        "get",
        f"{GATEWAY}/branches/a",
        "viewer",
        status=503,
        unknown=("/partitions/nowhere/branches/a",),
    ),
    Operation(
        "end_branch",
        "post",
        f"{GATEWAY}/branches/end",
        "operator",
        {"id": "a", **WHY},
        503,
        unknown=("/partitions/nowhere/branches/end",),
    ),
    Operation(
        "list_living_requests",
        "get",
        f"{GATEWAY}/living-requests",
        "viewer",
        status=503,
        unknown=("/partitions/nowhere/living-requests",),
    ),
    Operation(
        "cancel_request",
        "post",
        f"{GATEWAY}/living-requests/r-1/cancel",
        "operator",
        WHY,
        503,
        unknown=("/partitions/nowhere/living-requests/r-1/cancel",),
    ),
    _read("list_alerts", f"{GATEWAY}/alerts", "/partitions/nowhere/alerts"),
    Operation(
        "acknowledge_alert",
        "post",
        f"{GATEWAY}/alerts/{{alert}}/acknowledge",
        "operator",
        WHY,
        unknown=(f"{GATEWAY}/alerts/999999/acknowledge", "/partitions/nowhere/alerts/1/acknowledge"),
    ),
    _read("list_alert_rules", f"{GATEWAY}/alert-rules", "/partitions/nowhere/alert-rules"),
    _read("get_alert_rule", f"{GATEWAY}/alert-rules/queue-old", f"{GATEWAY}/alert-rules/nope"),
    Operation(
        "edit_alert_rule",
        "patch",
        f"{GATEWAY}/alert-rules/queue-old",
        "operator",
        {"threshold": 45},
        unknown=(f"{GATEWAY}/alert-rules/nope", "/partitions/nowhere/alert-rules/queue-old"),
    ),
    _read("list_history", f"{GATEWAY}/history", "/partitions/nowhere/history"),
    # channels
    _read("list_channels", "/channels"),
    Operation(
        "create_channel", "post", "/channels", "administrator", {"name": "mail", "url": "http://127.0.0.1:9/"}, 201
    ),
    _read("get_channel", "/channels/{channel}", "/channels/nope"),
    Operation(
        "edit_channel", "patch", "/channels/{channel}", "administrator", {"enabled": False}, unknown=("/channels/nope",)
    ),
    Operation(
        "delete_channel", "delete", "/channels/{channel}", "administrator", None, 204, unknown=("/channels/nope",)
    ),
    Operation(
        "test_channel", "post", "/channels/{channel}/test", "administrator", WHY, unknown=("/channels/nope/test",)
    ),
    Operation(
        "rotate_channel_secret",
        "post",
        "/channels/{channel}/rotate",
        "administrator",
        WHY,
        201,
        unknown=("/channels/nope/rotate",),
    ),
    _read("list_deliveries", "/channels/{channel}/deliveries", "/channels/nope/deliveries"),
    _read("list_changes", f"{GATEWAY}/audit", "/partitions/nowhere/audit"),
    # split
    _read("get_split", SPLIT, "/split/nowhere"),
    Operation(
        "force_split",
        "put",
        f"{SPLIT}/force",
        "administrator",
        {"prefill_nodes": 1, **WHY},
        unknown=("/split/nowhere/force",),
    ),
    Operation("clear_force", "delete", f"{SPLIT}/force", "administrator", unknown=("/split/nowhere/force",)),
    Operation(
        "force_node",
        "put",
        "/nodes/gb300-2/phase",
        "administrator",
        {"phase": "decode", **WHY},
        unknown=("/nodes/nowhere/phase",),
    ),
    Operation("freeze_split", "put", f"{SPLIT}/freeze", "administrator", WHY, unknown=("/split/nowhere/freeze",)),
    Operation("unfreeze_split", "delete", f"{SPLIT}/freeze", "administrator", unknown=("/split/nowhere/freeze",)),
    Operation(
        "set_mode",
        "put",
        f"{SPLIT}/mode",
        "administrator",
        {"mode": "advisory"},
        unknown=("/split/nowhere/mode",),
    ),
    _read("get_policy", f"{SPLIT}/policy", "/split/nowhere/policy"),
    Operation(
        "edit_policy",
        "patch",
        f"{SPLIT}/policy",
        "administrator",
        {"cooldown_s": 5},
        unknown=("/split/nowhere/policy",),
    ),
    _read("list_proposals", f"{SPLIT}/proposals", "/split/nowhere/proposals"),
    Operation(
        "propose_split",
        "post",
        f"{SPLIT}/proposals",
        "operator",
        {"prefill_nodes": 1, "expires_at": LATER, **WHY},
        201,
        ("/split/nowhere/proposals",),
    ),
    Operation(
        "approve_proposal",
        "post",
        f"{SPLIT}/proposals/{{proposal}}/approve",
        "operator",
        WHY,
        unknown=(f"{SPLIT}/proposals/999999/approve", "/split/nowhere/proposals/1/approve"),
    ),
    Operation(
        "reject_proposal",
        "post",
        f"{SPLIT}/proposals/{{proposal}}/reject",
        "operator",
        WHY,
        unknown=(f"{SPLIT}/proposals/999999/reject",),
    ),
    _read("list_dry_runs", f"{SPLIT}/dry-runs", "/split/nowhere/dry-runs"),
    _read("get_dry_run", f"{SPLIT}/dry-runs/{{dry_run}}", f"{SPLIT}/dry-runs/999999"),
    Operation(
        "ask_dry_run",
        "post",
        f"{SPLIT}/dry-runs",
        "operator",
        {"prefill_nodes": 1},
        202,
        ("/split/nowhere/dry-runs",),
    ),
    _read("list_experiments", "/experiments"),
    _read("get_experiment", "/experiments/bands", "/experiments/nope"),
    Operation(
        "start_experiment",
        "post",
        "/experiments/{idle}/start",
        "operator",
        WHY,
        202,
        unknown=("/experiments/nope/start",),
    ),
    Operation(
        "cancel_experiment",
        "post",
        "/experiments/{busy}/cancel",
        "operator",
        WHY,
        unknown=("/experiments/nope/cancel",),
    ),
    _read("list_fits", f"{SPLIT}/fits", "/split/nowhere/fits"),
    _read("get_fit", f"{SPLIT}/fits/{{fit}}", f"{SPLIT}/fits/999999"),
    Operation(
        "start_warm_up", "post", f"{SPLIT}/warm-up", "administrator", WHY, 201, unknown=("/split/nowhere/warm-up",)
    ),
    Operation("stop_warm_up", "delete", f"{SPLIT}/warm-up", "administrator", unknown=("/split/nowhere/warm-up",)),
    _read("list_decisions", f"{SPLIT}/decisions", "/split/nowhere/decisions"),
    _read("get_decision", f"{SPLIT}/decisions/{{decision}}", f"{SPLIT}/decisions/999999"),
    _read("list_orders", f"{SPLIT}/orders", "/split/nowhere/orders"),
    _read("get_order", f"{SPLIT}/orders/{{order}}", f"{SPLIT}/orders/999999"),
    Operation(
        "roll_back_order",
        "post",
        f"{SPLIT}/orders/{{order}}/rollback",
        "operator",
        WHY,
        unknown=(f"{SPLIT}/orders/999999/rollback",),
    ),
]
BY_NAME = {operation.name: operation for operation in OPERATIONS}
# What a tenant user may read of the own tenant, so that "viewer" is not the lowest role.
OPEN_TO_TENANT_USERS = {
    "list_tenants", "get_tenant", "list_keys", "list_requests", "get_request", "list_branches", "list_living_requests",
    "get_request_sums",
}  # fmt: skip
