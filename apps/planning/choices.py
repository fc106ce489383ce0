"""Modes, verdicts and states of planning, each with label and colour."""

from __future__ import annotations

from django.db.models import TextChoices


class Mode(TextChoices):
    """Who decides about the split."""

    AUTOMATIC = "automatic", "Automatic"
    APPROVE = "approve", "Approve"
    ADVISORY = "advisory", "Advisory"
    FROZEN = "frozen", "Frozen"

    @property
    def colour(self) -> str:
        return {"automatic": "green", "approve": "blue", "advisory": "grey", "frozen": "amber"}[self.value]


class Verdict(TextChoices):
    SWITCH = "switch", "Switch"
    HOLD = "hold", "Hold"

    @property
    def colour(self) -> str:
        return {"switch": "blue", "hold": "grey"}[self.value]


class Action(TextChoices):
    """What was done with a verdict."""

    NONE = "none", "Nothing to do"
    ORDERED = "ordered", "Ordered"
    PROPOSED = "proposed", "Proposed"
    ADVISED = "advised", "Advised"

    @property
    def colour(self) -> str:
        return {"none": "grey", "ordered": "green", "proposed": "blue", "advised": "grey"}[self.value]


class Source(TextChoices):
    """Where the coefficients of a decision came from."""

    LEARNED = "learned", "Learned"
    CONFIGURED = "configured", "Configured"

    @property
    def colour(self) -> str:
        return {"learned": "green", "configured": "grey"}[self.value]


class ProposalState(TextChoices):
    """`stale`: the split, the fit or the workload moved; `expired`: nobody decided in time."""

    OPEN = "open", "Open"
    APPROVED = "approved", "Approved"
    REJECTED = "rejected", "Rejected"
    STALE = "stale", "Stale"
    EXPIRED = "expired", "Expired"

    @property
    def colour(self) -> str:
        return {"open": "blue", "approved": "green", "rejected": "red", "stale": "amber", "expired": "grey"}[self.value]


class VoteChoice(TextChoices):
    APPROVE = "approve", "Approve"
    REJECT = "reject", "Reject"

    @property
    def colour(self) -> str:
        return {"approve": "green", "reject": "red"}[self.value]


class OrderState(TextChoices):
    """As in `domain/phase_machine.py`."""

    ORDERED = "ordered", "Ordered"
    DRAINING = "draining", "Draining"
    SWITCHING = "switching", "Switching"
    COOLING = "cooling", "Cooling"
    DONE = "done", "Done"
    FAILED = "failed", "Failed"
    ROLLED_BACK = "rolled-back", "Rolled back"

    @property
    def colour(self) -> str:
        return {
            "ordered": "blue",
            "draining": "amber",
            "switching": "orange",
            "cooling": "violet",
            "done": "green",
            "failed": "red",
            "rolled-back": "grey",
        }[self.value]


class StepState(TextChoices):
    WAITING = "waiting", "Waiting"
    DRAINING = "draining", "Draining"
    SWITCHING = "switching", "Switching"
    SWITCHED = "switched", "Switched"
    FAILED = "failed", "Failed"
    CANCELLED = "cancelled", "Cancelled"

    @property
    def colour(self) -> str:
        return {
            "waiting": "grey",
            "draining": "amber",
            "switching": "orange",
            "switched": "green",
            "failed": "red",
            "cancelled": "grey",
        }[self.value]


class Cause(TextChoices):
    """Why a switch was ordered."""

    PLANNER = "planner", "Planner"
    PROPOSAL = "proposal", "Approved proposal"
    FORCE = "force", "Forced by an operator"
    ROLLBACK = "rollback", "Rolled back by an operator"
    WATCH = "watch", "Rolled back by the planner"
    WARM_UP = "warm-up", "Warm-up"

    @property
    def colour(self) -> str:
        return {
            "planner": "blue",
            "proposal": "green",
            "force": "amber",
            "rollback": "violet",
            "watch": "red",
            "warm-up": "grey",
        }[self.value]


class FitState(TextChoices):
    """`retired`: reality drifted away from it, or a newer fit replaced it."""

    ACCEPTED = "accepted", "Accepted"
    REFUSED = "refused", "Too wrong to plan with"
    RETIRED = "retired", "Retired"

    @property
    def colour(self) -> str:
        return {"accepted": "green", "refused": "red", "retired": "grey"}[self.value]


class WarmUpState(TextChoices):
    RUNNING = "running", "Running"
    DONE = "done", "Model learned"
    STOPPED = "stopped", "Stopped"
    GIVEN_UP = "given-up", "Given up"

    @property
    def colour(self) -> str:
        return {"running": "blue", "done": "green", "stopped": "grey", "given-up": "amber"}[self.value]


class DryRunState(TextChoices):
    WAITING = "waiting", "Waiting"
    RUNNING = "running", "Running"
    DONE = "done", "Done"
    FAILED = "failed", "Failed"

    @property
    def colour(self) -> str:
        return {"waiting": "grey", "running": "blue", "done": "green", "failed": "red"}[self.value]
