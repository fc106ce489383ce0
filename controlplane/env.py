"""What the environment says, read in one place. Every variable is listed in docs/interfaces.md, section 12."""

from __future__ import annotations

import json
import os
import secrets
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def data_folder() -> Path:
    """The folder that holds everything Switchyard keeps: databases, secrets, weights, node state. Created when missing."""
    folder = Path(os.environ.get("SWITCHYARD_DATA") or ROOT / "data").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _secrets_file() -> Path:
    return data_folder() / "secrets.json"


@cache
def secret(name: str) -> str:
    """A secret from the environment (SWITCHYARD_<NAME>), else one made once and kept in the data folder with mode 0600."""
    given = os.environ.get(f"SWITCHYARD_{name.upper()}")
    if given:
        return given
    path = _secrets_file()
    kept = json.loads(path.read_text()) if path.exists() else {}
    if name not in kept:
        kept[name] = secrets.token_urlsafe(48)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as handle:
            json.dump(kept, handle)
        scratch.replace(path)
    return str(kept[name])


def embedded_urls() -> dict[str, str]:
    """URLs of running embedded servers, as `controlplane.embedded` wrote them; empty when none were started."""
    path = data_folder() / "services.json"
    return json.loads(path.read_text()) if path.exists() else {}


def database_url() -> str:
    return os.environ.get("DATABASE_URL") or embedded_urls().get("DATABASE_URL", "")


def redis_url() -> str:
    return os.environ.get("REDIS_URL") or embedded_urls().get("REDIS_URL", "")


def flag(name: str, default: bool = False) -> bool:
    return os.environ.get(name, "1" if default else "0").lower() in {"1", "true", "yes", "on"}


def host() -> str:
    return os.environ.get("SWITCHYARD_HOST", "127.0.0.1")


def web_port() -> int:
    return int(os.environ.get("SWITCHYARD_WEB_PORT", "8000"))


def text(name: str, default: str = "") -> str:
    return os.environ.get(name, default)
