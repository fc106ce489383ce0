"""Embedded PostgreSQL and Valkey keep what they acknowledged."""

import os
import signal
import subprocess
from pathlib import Path

import psycopg
import pytest
import redis

from controlplane.embedded import EmbeddedServices, unprivileged


@pytest.fixture
def services(tmp_path: Path):
    made = EmbeddedServices(tmp_path, password="p%w/d", use_environment=False)
    yield made
    made.stop()


def test_killed_servers_come_back_with_everything_they_acknowledged(services: EmbeddedServices) -> None:
    services.start()
    with psycopg.connect(services.postgres.url, autocommit=True) as connection:
        connection.execute("create table kept (n int)")
        connection.execute("insert into kept values (7)")
    redis.Redis.from_url(services.valkey.url).set("kept", "7")
    for _, process in services._processes:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    services._processes.clear()

    services.start()

    with psycopg.connect(services.postgres.url) as connection:
        assert connection.execute("select n from kept").fetchone() == (7,)
    assert redis.Redis.from_url(services.valkey.url).get("kept") == b"7"


def test_a_second_start_on_the_same_folder_is_refused(services: EmbeddedServices, tmp_path: Path) -> None:
    services.start()
    with pytest.raises(RuntimeError, match="already runs"):
        EmbeddedServices(tmp_path, password="p%w/d", use_environment=False).postgres.prepare()


def test_a_lock_file_whose_process_id_now_belongs_to_another_program_does_not_stop_a_start(
    services: EmbeddedServices, tmp_path: Path
) -> None:
    services.start()
    services.stop()
    (tmp_path / "postgres" / "postmaster.pid").write_text(f"{os.getpid()}\n")
    services.start()
    assert services.postgres.ready()


def test_secrets_and_sockets_are_closed_to_others(services: EmbeddedServices, tmp_path: Path) -> None:
    services.start()
    assert (tmp_path / "services.json").stat().st_mode & 0o077 == 0
    assert (tmp_path / "postgres").stat().st_mode & 0o077 == 0
    assert services.postgres.sockets.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to drop")
def test_root_is_left_behind() -> None:
    assert unprivileged.mode() in {"namespace", "nobody"}


def test_inside_the_namespace_the_user_has_a_name() -> None:
    done = subprocess.run(unprivileged.wrap(["id", "-un"], "namespace"), capture_output=True, text=True, check=False)
    if done.returncode != 0 and "namespace cannot be created" in done.stderr:
        pytest.skip("no user namespaces here: PostgreSQL runs as nobody")
    assert done.stdout == "nobody\n", done.stderr


def test_a_user_id_without_a_name_also_takes_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    unprivileged.mode.cache_clear()
    try:
        named = unprivileged.mode() == "plain"
    finally:
        unprivileged.mode.cache_clear()
    assert not named or subprocess.run(unprivileged.wrap(["true"], "namespace"), check=False).returncode != 0
