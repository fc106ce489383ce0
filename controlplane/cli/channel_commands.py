"""`switchyard channels ...`: webhooks."""

from __future__ import annotations

from typing import Any

from controlplane.cli.api_types import ChannelEdit, ChannelIn
from controlplane.cli.call import Call, Result
from controlplane.cli.client import CliError, pages
from controlplane.cli.tables import ago, facts, table


def _kinds(call: Call) -> list[str]:
    return [kind.strip() for kind in str(call.args.kinds).split(",") if kind.strip()]


def listed(call: Call) -> Result:
    found = list(pages(call.api.list_channels))
    rows = [
        (c["name"], c["url"], c["kinds"], c["enabled"], c["last_status"], ago(c["last_at"]), ago(c["secret_set_at"]))
        for c in found
    ]
    columns = ("channel", "address", "told of", "enabled", "last message", "sent", "secret set")
    return Result(found, table(columns, rows, "no channel"))


def create(call: Call) -> Result:
    body: ChannelIn = {"name": call.args.name, "url": call.args.address, "reason": call.reason}
    if call.args.kinds is not None:
        body["kinds"] = _kinds(call)
    made = call.api.create_channel(body)
    return Result(made, _secret_text(made))


def edit(call: Call) -> Result:
    body: ChannelEdit = {"reason": call.reason}
    if call.args.to is not None:
        body["url"] = call.args.to
    if call.args.kinds is not None:
        body["kinds"] = _kinds(call)
    if len(body) == 1:
        raise CliError("say what to change: --to ADDRESS, --kinds KIND,KIND")
    return _shown(call.api.edit_channel(call.args.name, body))


def enable(call: Call) -> Result:
    return _shown(call.api.edit_channel(call.args.name, {"enabled": True, "reason": call.reason}))


def disable(call: Call) -> Result:
    return _shown(call.api.edit_channel(call.args.name, {"enabled": False, "reason": call.reason}))


def _shown(found: Any) -> Result:
    return Result(found, facts(found))


def test(call: Call) -> Result:
    found = call.api.test_channel(call.args.name, {"reason": call.reason})
    return Result(found, f"{call.args.name}: {found['status']}", 0 if found["delivered"] else 1)


def rotate(call: Call) -> Result:
    call.confirm(f"Give {call.args.name} a new secret; the present one is worth nothing then", call.args.name)
    made = call.api.rotate_channel_secret(call.args.name, {"reason": call.reason})
    return Result(made, _secret_text(made))


def _secret_text(made: Any) -> str:
    return f"channel {made['channel']['name']}, its secret is shown this once:\n{made['secret']}"


def delete(call: Call) -> Result:
    call.confirm(f"Delete channel {call.args.name}", call.args.name)
    call.api.delete_channel(call.args.name, reason=call.reason)
    return Result({"deleted": call.args.name}, f"channel {call.args.name} is gone")


def deliveries(call: Call) -> Result:
    found = list(pages(call.api.list_deliveries, call.args.name, most=call.args.limit))
    rows = [(d["id"], d["kind"], ago(d["created_at"]), d["attempts"], _outcome(d), d["last_error"]) for d in found]
    return Result(found, table(("message", "kind", "made", "tries", "how it is", "last problem"), rows, "none yet"))


def _outcome(delivery: Any) -> str:
    if delivery["delivered_at"]:
        return f"delivered {ago(delivery['delivered_at'])}"
    if delivery["given_up_at"]:
        return f"given up {ago(delivery['given_up_at'])}"
    return f"{'again' if delivery['attempts'] else 'due'} {ago(delivery['next_try_at'])}"
