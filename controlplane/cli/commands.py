"""Every other command: status, queues, nodes, requests, branches, tenants, keys, configuration, audit, alerts."""

from __future__ import annotations

from typing import Any, cast

from controlplane.cli.api_types import ApplyIn, KeyIn, KeyRole, Phase, PhaseIn
from controlplane.cli.call import Call, Result, read_documents
from controlplane.cli.client import CliError, pages
from controlplane.cli.tables import ago, facts, shown, span, split, table


def status(call: Call) -> Result:
    names = [call.args.partition] if call.args.partition else [p["name"] for p in pages(call.api.list_partitions)]
    found = [_status_of(call, name) for name in names]
    return Result(found, "\n\n".join(_status_text(one) for one in found) or "no partition")


def _status_of(call: Call, name: str) -> dict[str, Any]:
    try:
        live: dict[str, Any] | None = call.api.get_live(name)
    except CliError as error:
        if (error.problem or {}).get("status") != 503:
            raise
        live = None
    planned = call.api.get_split(name)
    alerts = list(pages(call.api.list_alerts, name, state="firing"))
    return {"partition": name, "live": live, "split": planned, "alerts": alerts}


def _status_text(one: dict[str, Any]) -> str:
    live, planned = one["live"], one["split"]
    silent: Any = {"verdict": {"level": "unknown", "reason": "the gateway has not reported for ten seconds"}}
    live = silent if live is None else live
    verdict, latency, reuse = live.get("verdict", {}), live.get("latency", {}), live.get("reuse", {})
    requests, rate = live.get("requests", {}), live.get("throughput", {})
    ttft, e2e = latency.get("ttft_s") or {}, latency.get("e2e_s") or {}
    prompt = reuse.get("prompt_tokens")
    lines = {
        one["partition"]: f"{verdict.get('level', 'unknown')}: {verdict.get('reason') or 'nothing to report'}",
        "split": f"{split(planned['current'])}, mode {planned['policy']['mode']}"
        + (f", forced {split(planned['forced'])}" if planned["forced"] else "")
        + (f", proposal {planned['open_proposal']['id']} is open" if planned["open_proposal"] else ""),
        "requests": f"{shown(requests.get('waiting'))} waiting, {shown(requests.get('running'))} running, "
        f"{shown(rate.get('requests_per_s'))}/s",
        "TTFT": f"p50 {span(ttft.get('p50'))}, p95 {span(ttft.get('p95'))} (target {span(planned['policy']['slo_ttft_s'])})",
        "E2E": f"p50 {span(e2e.get('p50'))}, p95 {span(e2e.get('p95'))}",
        "reused": f"{reuse.get('actual_tokens', 0) / prompt:.1%} of the prompts' tokens" if prompt else None,
        "alerts": "; ".join(f"{a['rule']} ({a['severity']}): {a['summary']}" for a in one["alerts"]) or "none",
    }
    return facts(lines)


def queues(call: Call) -> Result:
    found = call.api.get_queues(call.partition)
    rows = [
        (b["name"], b["priority"], b["waiting"], span(b["oldest_s"]), span(b["expected_wait_s"]), b["dispatched_per_s"],
         ", ".join(f"{why} {n}" for why, n in b["dropped"].items() if n), b.get("waits_for"))
        for b in found["bands"]
    ]  # fmt: skip
    columns = ("band", "priority", "waiting", "oldest", "expected", "sent/s", "dropped", "waits for")
    stages = [(name, s.get("saturation"), s.get("in_flight"), s.get("limit")) for name, s in found["stages"].items()]
    text = table(columns, rows) + "\n\n" + table(("stage", "saturation", "in flight", "limit"), stages)
    return Result(found, text)


def bands(call: Call) -> Result:
    found = list(pages(call.api.list_bands, call.partition))
    fields = (
        "name",
        "priority",
        "fairness",
        "ordering",
        "max_requests",
        "ttl_s",
        "ceiling",
        "min_share",
        "ttft_budget_s",
    )
    return Result(found, table(fields, ([band[name] for name in fields] for band in found)))


def band_set(call: Call) -> Result:
    names = ("priority", "max_requests", "ttl_s", "ceiling", "min_share", "ttft_budget_s", "fairness", "ordering")
    changes = {name: getattr(call.args, name) for name in names if getattr(call.args, name) is not None}
    if not changes:
        raise CliError("say what to change, such as --priority 10")
    found = call.api.edit_band(call.partition, call.args.name, cast(Any, changes | {"reason": call.reason}))
    return Result(found, facts(found))


def nodes(call: Call) -> Result:
    found = list(pages(call.api.list_nodes, call.partition))
    rows = [
        (n["name"], n["desired_phase"], n["observed_phase"], n["observed_state"], n["draining"], n["enabled"],
         n["hardware_class"], ago(n["observed_at"]), n["url"])
        for n in found
    ]  # fmt: skip
    columns = ("node", "desired", "observed", "state", "draining", "enabled", "class", "heard", "address")
    return Result(found, table(columns, rows))


def drain(call: Call) -> Result:
    found = call.api.drain_node(call.args.name, {"reason": call.reason})
    return Result(found, f"{found['name']} drains")


def delete_node(call: Call) -> Result:
    call.confirm(f"Forget the node {call.args.name}", call.args.name)
    call.api.delete_node(call.args.name, reason=call.reason)
    return Result({"deleted": call.args.name}, f"{call.args.name} is forgotten")


def undrain(call: Call) -> Result:
    found = call.api.undrain_node(call.args.name, {"reason": call.reason})
    return Result(found, f"{found['name']} is back in service")


def phase(call: Call) -> Result:
    call.confirm(f"Force {call.args.name} to {call.args.phase}", call.args.name)
    body: PhaseIn = {"phase": cast(Phase, call.args.phase), "reason": call.reason}
    if call.args.expires_in is not None:
        body["expires_in_s"] = call.args.expires_in
    found = call.api.force_node(call.args.name, body)
    return Result(found, f"{call.args.name} to {call.args.phase}; follow it with `switchyard split wait`")


def requests(call: Call) -> Result:
    narrow = {name: getattr(call.args, name) for name in ("tenant", "band", "node") if getattr(call.args, name)}
    if call.args.ended:
        ended = list(pages(call.api.list_requests, call.partition, most=call.args.limit, **narrow))
        rows = [
            (r["request_id"], ago(r["at"]), r["tenant"], r["band"], r["outcome"], r["prefill_node"], r["decode_node"],
             r["prompt_tokens"], r["cached_tokens"], r["output_tokens"], span(r["ttft_s"]), span(r["e2e_s"]))
            for r in ended
        ]  # fmt: skip
        columns = ("request", "when", "tenant", "band", "outcome", "prefill", "decode", "prompt", "cached", "output",
                   "TTFT", "E2E")  # fmt: skip
        return Result(ended, table(columns, rows))
    found = call.api.list_living_requests(call.partition, limit=call.args.limit, **narrow)
    living = [
        (r["id"], span(r["age_s"]), r["tenant"], r["band"], r["stage"], r["prefill_node"], r["decode_node"],
         r["prompt_tokens"], r["output_tokens"], r["waiting_for"] or r["reason"])
        for r in found["rows"]
    ]  # fmt: skip
    shown_columns = ("request", "age", "tenant", "band", "stage", "prefill", "decode", "prompt", "output", "why")
    return Result(found, table(shown_columns, living, "nothing is under way") + f"\n{found['total']} in all")


def request_sums(call: Call) -> Result:
    names = ("since", "until", "tenant", "band")
    narrow = {name: getattr(call.args, name) for name in names if getattr(call.args, name)}
    found = call.api.get_request_sums(call.partition, **narrow)
    whole = found["whole"]
    told = [f"{found['since']} to {found['until']}"]
    if whole:
        outcomes = ", ".join(f"{n} {name}" for name, n in sorted(whole["outcomes"].items()))
        told.append(f"{whole['requests']} requests" + (f": {outcomes}" if outcomes else ""))
        spreads = [
            (name, each["n"], span(each["p50"]), span(each["p95"]), span(each["p99"]))
            for name, each in whole["times_s"].items()
        ]
        told.append(table(("time", "requests", "p50", "p95", "p99"), spreads))
    if found["bands"]:
        bands = [
            (b["band"], b["requests"], b["outcomes"].get("completed", 0), span(b["queue_s"]["p50"]),
             span(b["queue_s"]["p95"]))
            for b in found["bands"]
        ]  # fmt: skip
        told.append(table(("band", "requests", "completed", "queued p50", "queued p95"), bands))
    tenants = [
        (t["tenant"], t["requests"], t["prompt_tokens"], t["cached_tokens"], t["output_tokens"], span(t["mean_ttft_s"]))
        for t in found["tenants"]
    ]
    if tenants or not call.args.band:
        columns = ("tenant", "requests", "prompt", "cached", "output", "mean TTFT")
        told.append(table(columns, tenants, "no request of a tenant ended in this time"))
    return Result(found, "\n\n".join(told))


def request(call: Call) -> Result:
    found = call.api.get_request(call.partition, call.args.id)
    return Result(found, facts({name: value for name, value in found.items() if name != "detail"}))


def cancel(call: Call) -> Result:
    call.api.cancel_request(call.partition, call.args.id, {"reason": call.reason})
    return Result({"cancelled": call.args.id}, f"{call.args.id} is cancelled")


def branches(call: Call) -> Result:
    found = call.api.list_branches(call.partition, tenant=call.args.tenant, limit=call.args.limit)
    rows = [
        (b["id"], b["tenant"], b["kind"], b["parent"], b["version"], b["blocks"],
         ", ".join(f"{node} {n}" for node, n in b["held"].items()), sum(b["gone"].values()))
        for b in found.get("rows", [])
    ]  # fmt: skip
    columns = ("branch", "tenant", "kind", "parent", "version", "blocks", "held", "evicted")
    return Result(found, table(columns, rows, "no live branch"))


def end_branch(call: Call) -> Result:
    call.api.end_branch(call.partition, {"id": call.args.id, "reason": call.reason})
    return Result({"ended": call.args.id}, f"{call.args.id} is ended; its blocks go first")


def tenants(call: Call) -> Result:
    found = list(pages(call.api.list_tenants))
    fields = ("name", "title", "weight", "paused", "sharing_domain", "default_objective")
    return Result(found, table(fields, ([row[name] for name in fields] for row in found)))


def create_tenant(call: Call) -> Result:
    body: dict[str, Any] = {"name": call.args.name, "title": call.args.title, "reason": call.reason}
    if call.args.weight is not None:
        body["weight"] = call.args.weight
    found = call.api.create_tenant(cast(Any, body))
    return Result(found, facts(found))


def pause(call: Call) -> Result:
    found = call.api.pause_tenant(call.args.name, {"reason": call.reason})
    return Result(found, f"{found['name']} is paused")


def resume(call: Call) -> Result:
    found = call.api.resume_tenant(call.args.name, {"reason": call.reason})
    return Result(found, f"{found['name']} goes on")


def keys(call: Call) -> Result:
    found = list(pages(call.api.list_keys, call.args.tenant))
    rows = [
        (k["id"], k["name"], k["prefix"], k["role"] or "inference", k["owner"] or "", k["objectives"],
         "revoked" if k["revoked_at"] else ago(k["expires_at"]) if k["expires_at"] else "never", ago(k["last_used_at"]))
        for k in found
    ]  # fmt: skip
    return Result(found, table(("key", "name", "begins", "role", "whose", "objectives", "expires", "used"), rows))


def issue_key(call: Call) -> Result:
    body: KeyIn = {"name": call.args.name, "reason": call.reason, "role": cast(KeyRole, call.args.role)}
    if call.args.expires_at:
        body["expires_at"] = call.args.expires_at
    if call.args.owner:
        body["owner"] = call.args.owner
    made = call.api.issue_key(call.args.tenant, body)
    return Result(made, _key_text(made))


def rotate_key(call: Call) -> Result:
    made = call.api.rotate_key(call.args.number, {"reason": call.reason})
    return Result(made, _key_text(made))


def _key_text(made: Any) -> str:
    return f"key {made['key']['id']} ({made['key']['name']}), shown this once:\n{made['secret']}"


def revoke_key(call: Call) -> Result:
    call.confirm(f"Revoke key {call.args.number}", str(call.args.number))
    found = call.api.revoke_key(call.args.number, {"reason": call.reason})
    return Result(found, f"key {found['id']} ({found['name']}) is revoked")


def config_export(call: Call) -> Result:
    text = call.api.export_flow_config(call.partition) if call.args.flow else call.api.export_documents(call.partition)
    return Result({"yaml": text}, str(text).rstrip())


def config_history(call: Call) -> Result:
    found = list(pages(call.api.list_configurations, call.partition, most=call.args.limit))
    rows = [(v["version"], ago(v["created_at"]), v["author"], v["reason"]) for v in found]
    return Result(found, table(("version", "when", "by", "why"), rows))


def config_revert(call: Call) -> Result:
    found = call.api.revert_flow_config(
        call.partition, {"version": call.args.version, "reason": call.reason, "dry_run": call.args.dry_run}
    )
    return Result(found, _changes_text(found))


def apply(call: Call) -> Result:
    found = call.api.apply_documents(_documents(call, dry_run=call.args.dry_run))
    return Result(found, _changes_text(found))


def diff(call: Call) -> Result:
    """Exit status 1 when something would change, as `diff` has it."""
    found = call.api.apply_documents(_documents(call, dry_run=True))
    return Result(found, _changes_text(found), 1 if found["changes"] else 0)


def _documents(call: Call, dry_run: bool) -> ApplyIn:
    text = read_documents(call.args.file)
    return {
        "yaml": text,
        "partition": call.args.partition or "",
        "pool": call.args.pool,
        "reason": call.reason,
        "dry_run": dry_run,
    }


def _changes_text(found: Any) -> str:
    lines = [f"note: {note}" for note in found["notes"]]
    for each in found["changes"]:
        lines += [each["path"]]
        lines += [f"  - {shown(each['before'])}"] if each["before"] is not None else []
        lines += [f"  + {shown(each['after'])}"] if each["after"] is not None else []
    count = len(found["changes"])
    done = "applied" if found["applied"] else "would change"
    return "\n".join([*lines, f"{count} field{'' if count == 1 else 's'} {done}" if count else "nothing to change"])


def audit(call: Call) -> Result:
    found = call.api.list_changes(
        call.partition, table=call.args.table, actor=call.args.actor, text=call.args.text, limit=call.args.limit
    )
    rows = [
        (ago(c["at"]), c["actor"], c["done"], c["table"], c["subject"], c["reason"],
         ", ".join(f["field"] for f in c["changes"]))
        for c in found
    ]  # fmt: skip
    return Result(found, table(("when", "who", "did", "table", "what", "why", "fields"), rows))


def alerts(call: Call) -> Result:
    found = list(pages(call.api.list_alerts, call.partition, most=call.args.limit, state=call.args.state or None))
    rows = [
        (
            a["id"],
            a["state"],
            a["severity"],
            a["rule"],
            a["subject"],
            ago(a["since"]),
            a["acknowledged_by"],
            a["summary"],
        )
        for a in found
    ]
    columns = ("alert", "state", "severity", "rule", "subject", "since", "looked after by", "summary")
    return Result(found, table(columns, rows, "no alert"))


def acknowledge(call: Call) -> Result:
    found = call.api.acknowledge_alert(call.partition, call.args.number, {"reason": call.reason})
    return Result(found, f"alert {found['id']} is looked after by {found['acknowledged_by']}")


def whoami(call: Call) -> Result:
    found = call.api.who_am_i()
    return Result(found, facts(found))
