"""An action with a form: shown in place, refused at its fields, answered with what was done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from apps.console.forms import RowForm, ServiceForm
from controlplane.audit_trail import last_changes
from controlplane.errors import SwitchyardError
from controlplane.permissions import Forbidden

# The browser event after which parts of a page ask for their state again.
CHANGED = "switchyard:changed"


def posted(request: HttpRequest) -> Any:
    """What a form is bound to: the posted fields, None when it is only to be shown."""
    return request.POST if request.method == "POST" else None


def stale(form: RowForm) -> bool:
    """Whether somebody changed the row since the form was shown; then it says who and what, and keeps the own changes."""
    theirs = form.theirs
    if not theirs:
        return False
    entry = next(iter(last_changes(form.row, 1)), None)
    form.stale = [
        {
            "field": str(form.fields[name].label or name.replace("_", " ")).lower(),
            "was": was,
            "now": now,
            "by": entry.actor if entry else "someone",
            "at": entry.at.timestamp() if entry else None,
            "reason": entry.reason if entry else "",
        }
        for name, (was, now) in theirs.items()
    ]
    form.onto_theirs()
    return True


def answer(
    request: HttpRequest,
    form: ServiceForm,
    write: Callable[[], str],
    *,
    slot: str,
    title: str,
    submit: str,
    about: str = "",
    danger: bool = False,
) -> HttpResponse:
    """The form (GET), the form with its errors (422), or what `write` says it did, for the page's status line.

    `slot` is the id of the element that holds the form; it is emptied when the action is done.
    """
    context: dict[str, Any] = {"form": form, "slot": slot, "title": title, "submit": submit, "about": about}
    context |= {"danger": danger, "action": request.get_full_path()}
    if request.method == "GET":
        return render(request, "console/_action_form.html", context)
    if form.is_valid():
        if isinstance(form, RowForm) and stale(form):
            return render(request, "console/_action_form.html", context, status=409)
        try:
            done = write()
        except SwitchyardError as error:
            form.refuse(error)
        except Forbidden as error:
            form.add_error(None, f"{error}.")
        else:
            response = render(request, "console/_action_done.html", {"done": done, "slot": slot})
            response["HX-Retarget"], response["HX-Reswap"] = "#said", "innerHTML"
            response["HX-Trigger"] = CHANGED
            return response
    return render(request, "console/_action_form.html", context, status=422)
