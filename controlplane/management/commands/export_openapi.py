"""`manage.py export_openapi`: writes docs/openapi.json and the CLI's types of it; --check says whether they drifted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane import env
from controlplane.api import api
from controlplane.rest.typing import module_of

FILE = env.ROOT / "docs" / "openapi.json"
TYPES = env.ROOT / "controlplane" / "cli" / "api_types.py"


def described() -> str:
    """The API's description as it is committed."""
    return json.dumps(api.get_openapi_schema(), indent=1, sort_keys=True, default=str) + "\n"


class Command(BaseCommand):
    help = "Writes docs/openapi.json and controlplane/cli/api_types.py; --check only compares."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--check", action="store_true", help="exit 1 when a file differs")
        parser.add_argument("--output", type=Path, default=FILE)
        parser.add_argument("--types", type=Path, default=TYPES)

    def handle(self, *args: Any, **options: Any) -> None:
        text = described()
        for path, wanted in ((options["output"], text), (options["types"], module_of(json.loads(text)))):
            if not options["check"]:
                path.write_text(wanted)
                self.stdout.write(f"wrote {path.name}")
            elif not path.exists() or path.read_text() != wanted:
                raise CommandError(f"{path.name} differs from the API; run `make openapi`")
