"""`make check`: every static check, one after another; all run, the exit code says whether all passed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CODE = ["apps", "bench", "controlplane", "workers", "tools", "tests", "manage.py"]
TYPED = ["apps", "bench", "controlplane", "workers", "tools"]
DEPLOYED = {
    "SWITCHYARD_TLS": "1",
    "SWITCHYARD_SECRET_KEY": "a-secret-key-for-the-deployment-check-0123456789-abcdefghij",
}

CHECKS: dict[str, list[str]] = {
    "lint": [str(BIN / "ruff"), "check", *CODE],
    "format": [str(BIN / "ruff"), "format", "--check", *CODE],
    "types": [str(BIN / "mypy"), *TYPED],
    "import contracts": [str(BIN / "lint-imports")],
    "deployment check": [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"],
    "migrations": [sys.executable, "manage.py", "makemigrations", "--check", "--dry-run"],
    "OpenAPI drift": [sys.executable, "manage.py", "export_openapi", "--check"],
    "Dockerfile": [str(BIN / "hadolint"), "docker/Dockerfile"],
    "compose file": [str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", "docker/compose.yaml"],
}


def main() -> int:
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **DEPLOYED, "SWITCHYARD_DATA": folder}
        for name, command in CHECKS.items():
            if not Path(command[0]).exists():
                print(f"skipped {name}: {Path(command[0]).name} has no build for this platform")
                continue
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            print(f"{'ok     ' if done.returncode == 0 else 'FAILED '} {name}")
            if done.returncode != 0:
                failed.append(name)
                print(done.stdout + done.stderr)
    print(f"{len(CHECKS) - len(failed)} of {len(CHECKS)} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
