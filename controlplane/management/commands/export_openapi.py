"""`manage.py export_openapi`: writes docs/openapi.json, or with --check says whether it has drifted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane import env
from controlplane.api import api

FILE = env.ROOT / "docs" / "openapi.json"


def described() -> str:
    """The API's description as it is committed."""
    return json.dumps(api.get_openapi_schema(), indent=1, sort_keys=True, default=str) + "\n"


class Command(BaseCommand):
    help = "Writes docs/openapi.json; --check only compares."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--check", action="store_true", help="exit 1 when the file differs")
        parser.add_argument("--output", type=Path, default=FILE)

    def handle(self, *args: Any, **options: Any) -> None:
        path: Path = options["output"]
        text = described()
        if not options["check"]:
            path.write_text(text)
            self.stdout.write(f"wrote {path.name}")
        elif not path.exists() or path.read_text() != text:
            raise CommandError(f"{path.name} differs from the API; run `manage.py export_openapi`")
