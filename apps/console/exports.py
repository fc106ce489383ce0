"""Tables as files: CSV for spreadsheets, JSON for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from django.http import HttpResponse, JsonResponse

# A cell that begins with one of these is run as a formula by spreadsheets.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def _cell(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return "" if value is None else value


def csv_response(name: str, rows: Sequence[dict[str, Any]]) -> HttpResponse:
    """One line a row; columns are the union of the rows' members in order of appearance."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows([_cell(row.get(column)) for column in columns] for row in rows)
    response = HttpResponse(text.getvalue(), content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


def json_response(name: str, document: Any) -> JsonResponse:
    response = JsonResponse(document, safe=False)
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


def exported(kind: str | None, name: str, rows: Sequence[dict[str, Any]]) -> HttpResponse | None:
    """The file when `kind` is `csv` or `json`; None when the page itself is wanted."""
    if kind == "csv":
        return csv_response(f"{name}.csv", rows)
    if kind == "json":
        return json_response(f"{name}.json", list(rows))
    return None
