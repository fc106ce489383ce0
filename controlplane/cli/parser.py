"""What can be typed: every command with its arguments and the function that does it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from controlplane.cli import channel_commands, commands, experiment_commands, split_commands
from controlplane.cli.call import Call, Result

Command = Callable[[Call], Result]
Argument = tuple[tuple[str, ...], dict[str, Any]]


def _arg(*names: str, **options: Any) -> Argument:
    return names, options


def _reason(required: bool = False) -> Argument:
    return _arg("-m", "--reason", required=required, default="", help="why; it ends in the audit trail")


YES = _arg("-y", "--yes", action="store_true", help="do it without asking")
EXPIRES = _arg("--expires-in", type=float, default=None, metavar="SECONDS", help="until when it holds")
PREFILL = _arg("prefill", help="how many nodes shall prefill, or their names with commas between")
NUMBER = _arg("number", type=int)
OPTIONAL_NUMBER = _arg("number", type=int, nargs="?")
NAME = _arg("name")
KINDS = _arg("--kinds", metavar="KIND,KIND", help="alert, decision, proposal, switch, config, or * for all")
FILE = _arg("-f", "--file", action="append", required=True, help="YAML, - for standard input; may be given again")
POOL = _arg("--pool", default="", help="what the YAML calls the partition, when it has another name there")


def _count(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def _limit(default: int) -> Argument:
    return _arg("-n", "--limit", type=_count, default=default, help=f"at most so many (default: {default})")


def _timeout(default: float) -> Argument:
    return _arg("--timeout", type=float, default=default, metavar="SECONDS")


Entry = tuple[str, str, Command, list[Argument]]
# A command, or a group: (what it is about, its commands).
TREE: dict[str, Any] = {
    "status": ("status", "how every partition is", commands.status, []),
    "queues": ("queues", "who waits in which band, and what the stages carry", commands.queues, []),
    "bands": (
        "priority bands",
        [
            ("list", "bands and their limits", commands.bands, []),
            ("set", "change a band", commands.band_set, [
                NAME, _reason(), _arg("--priority", type=int), _arg("--max-requests", type=int),
                *(_arg(f"--{name}", type=float) for name in ("ttl-s", "ceiling", "min-share", "ttft-budget-s")),
                _arg("--fairness"), _arg("--ordering"),
            ]),
        ],
    ),
    "split": (
        "which nodes prefill and which decode",
        [
            ("show", "current, proposed and forced split, and why", split_commands.show, []),
            ("propose", "a split for others to approve", split_commands.propose, [
                PREFILL, _reason(True), _arg("--expires-in", type=float, default=3600.0, metavar="SECONDS"),
            ]),
            ("approve", "the open proposal", split_commands.approve, [OPTIONAL_NUMBER, _reason(), YES]),
            ("reject", "the open proposal", split_commands.reject, [OPTIONAL_NUMBER, _reason(True)]),
            ("force", "a split, until it is ended", split_commands.force, [PREFILL, _reason(True), EXPIRES, YES]),
            ("unforce", "end every force", split_commands.unforce, [_reason()]),
            ("freeze", "the planner changes nothing", split_commands.freeze, [_reason(True), EXPIRES, YES]),
            ("unfreeze", "the planner goes on", split_commands.unfreeze, [_reason()]),
            ("mode", "who decides", split_commands.mode, [
                _arg("mode", choices=["automatic", "approve", "advisory", "frozen"]), _reason(),
            ]),
            ("rollback", "undo a switch, the last one if none is named", split_commands.rollback,
             [OPTIONAL_NUMBER, _reason(True), YES]),
            ("history", "switches, newest first", split_commands.history, [_limit(20)]),
            ("decisions", "the planner's verdicts, newest first", split_commands.decisions, [_limit(20)]),
            ("wait", "until no switch is under way", split_commands.wait, [_timeout(600.0)]),
        ],
    ),
    "simulate": ("simulate", "try a split in the simulator from the live state", split_commands.simulate,
                 [PREFILL, _reason(), _timeout(300.0)]),
    "experiments": (
        "published tables and claims of our own, measured in the simulator",
        [
            ("list", "what there is and when it was measured", experiment_commands.listed, []),
            ("show", "what was found beside what was published", experiment_commands.show, [NAME]),
            ("start", "ask a worker for it", experiment_commands.start,
             [NAME, _arg("--full", action="store_true", help="three seeds and the whole time; else one and half"), _reason()]),
            ("cancel", "stop after the run that is being made", experiment_commands.cancel, [NAME, _reason()]),
            ("wait", "until it is not under way; exit status 1 unless it is done", experiment_commands.wait,
             [NAME, _timeout(3600.0)]),
        ],
    ),
    "nodes": (
        "nodes",
        [
            ("list", "nodes, their phases and health", commands.nodes, []),
            ("drain", "no new work", commands.drain, [NAME, _reason()]),
            ("undrain", "back in service", commands.undrain, [NAME, _reason()]),
            ("delete", "forget a node that is out of service", commands.delete_node, [NAME, _reason(), YES]),
            ("phase", "force one node's phase", commands.phase, [
                NAME, _arg("phase", choices=["prefill", "decode", "mixed"]), _reason(True), EXPIRES, YES,
            ]),
        ],
    ),
    "requests": (
        "requests under way and ended",
        [
            ("list", "requests under way, longest here first; --ended for those that ended", commands.requests, [
                _arg("--ended", action="store_true"), *(_arg(f"--{n}") for n in ("tenant", "band", "node")), _limit(50),
            ]),
            ("show", "one that ended", commands.request, [_arg("id")]),
            ("sums", "what they came to in a period of the last 32 days; the last hour unless said", commands.request_sums,
             [_arg(f"--{n}") for n in ("since", "until", "tenant", "band")]),
            ("cancel", "end one; its client is told", commands.cancel, [_arg("id"), _reason(True)]),
        ],
    ),
    "branches": (
        "agents' branches",
        [
            ("list", "live branches and the blocks they keep", commands.branches, [_arg("--tenant"), _limit(100)]),
            ("end", "one that is dead", commands.end_branch, [_arg("id"), _reason(True)]),
        ],
    ),
    "tenants": (
        "tenants",
        [
            ("list", "tenants", commands.tenants, []),
            ("create", "a tenant", commands.create_tenant,
             [NAME, _arg("--title", default=""), _arg("--weight", type=float), _reason()]),
            ("pause", "refuse its new requests", commands.pause, [NAME, _reason()]),
            ("resume", "take its requests again", commands.resume, [NAME, _reason()]),
        ],
    ),
    "keys": (
        "API keys",
        [
            ("list", "a tenant's keys", commands.keys, [_arg("tenant")]),
            ("issue", "a new key, shown once", commands.issue_key, [
                _arg("tenant"), NAME, _reason(), _arg("--expires-at", metavar="TIME", help="such as 2027-01-01T00:00:00Z"),
                _arg("--role", default="", help="viewer, operator or administrator; none: for inference"),
                _arg("--owner", help="the user who acts through it; none: a service, without a vote"),
            ]),
            ("rotate", "a new text for a key", commands.rotate_key, [NUMBER, _reason()]),
            ("revoke", "end a key", commands.revoke_key, [NUMBER, _reason(), YES]),
        ],
    ),
    "config": (
        "configuration and its versions",
        [
            ("export", "everything that apply takes, as YAML", commands.config_export,
             [_arg("--flow", action="store_true", help="flow control alone, in llm-d's forms")]),
            ("import", "the same as apply", commands.apply, [FILE, POOL, _reason(), _arg("--dry-run", action="store_true")]),
            ("history", "published versions", commands.config_history, [_limit(20)]),
            ("revert", "flow control as it was in a version", commands.config_revert, [
                _arg("version", type=int), _reason(), _arg("--dry-run", action="store_true"),
            ]),
        ],
    ),
    "apply": ("apply", "apply YAML documents, all or none", commands.apply,
              [FILE, POOL, _reason(), _arg("--dry-run", action="store_true")]),
    "diff": ("diff", "what applying would change; exit status 1 when anything", commands.diff, [FILE, POOL, _reason()]),
    "audit": ("audit", "who changed what and why", commands.audit,
              [_arg("--table"), _arg("--actor"), _arg("--text"), _limit(50)]),
    "alerts": (
        "alerts",
        [
            ("list", "newest first", commands.alerts,
             [_arg("--state", choices=["pending", "firing", "resolved"], default=""), _limit(50)]),
            ("ack", "say that you look after one", commands.acknowledge, [NUMBER, _reason(True)]),
        ],
    ),
    "channels": (
        "webhooks: who is told of alerts, decisions, proposals, switches and versions",
        [
            ("list", "channels and how their last message went", channel_commands.listed, []),
            ("create", "a channel; its secret is shown once", channel_commands.create, [
                NAME, _arg("address"), KINDS, _reason(),
            ]),
            ("set", "change where it sends, or what it is told of", channel_commands.edit,
             [NAME, _arg("--to", metavar="ADDRESS", help="the new address"), KINDS, _reason()]),
            ("enable", "told again", channel_commands.enable, [NAME, _reason()]),
            ("disable", "told of nothing until it is enabled", channel_commands.disable, [NAME, _reason()]),
            ("test", "send one message now; exit status 1 when it did not arrive", channel_commands.test, [NAME, _reason()]),
            ("rotate", "a new secret, shown once", channel_commands.rotate, [NAME, _reason(), YES]),
            ("delete", "a channel with its unsent messages", channel_commands.delete, [NAME, _reason(), YES]),
            ("deliveries", "its messages, newest first", channel_commands.deliveries, [NAME, _limit(20)]),
        ],
    ),
    "whoami": ("whoami", "as whom you call, and what that may do", commands.whoami, []),
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="switchyard", description="Operate a Switchyard control plane.")
    _add_common(root, first=True)
    groups = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, entry in TREE.items():
        if len(entry) == 4:
            _add(groups, name, entry)
            continue
        title, entries = entry
        group = groups.add_parser(name, help=title, description=title)
        inner = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
        for each in entries:
            _add(inner, each[0], each)
    return root


def _add(groups: Any, name: str, entry: Entry) -> None:
    _, title, command, arguments = entry
    made = groups.add_parser(name, help=title, description=title)
    for names, options in arguments:
        made.add_argument(*names, **options)
    _add_common(made)
    made.set_defaults(command=command)


def _add_common(made: argparse.ArgumentParser, first: bool = False) -> None:
    """Before or after the command, as one types; the later place does not undo the earlier one."""
    unset: dict[str, Any] = {} if first else {"default": argparse.SUPPRESS}
    partition = unset or {"default": os.environ.get("SWITCHYARD_PARTITION", "")}
    url = unset or {"default": os.environ.get("SWITCHYARD_URL", "http://127.0.0.1:8000")}
    made.add_argument("-p", "--partition", help="which partition; not needed where there is one", **partition)
    made.add_argument("--url", help="the control plane; else SWITCHYARD_URL, else http://127.0.0.1:8000", **url)
    made.add_argument("--key-file", help="file with an API key; else SWITCHYARD_API_KEY", **(unset or {"default": ""}))
    made.add_argument("--json", action="store_true", help="JSON for programs", **unset)
