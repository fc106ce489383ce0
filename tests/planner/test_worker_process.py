"""A real Celery worker with beat, real agents: a forced switch is driven, also when the worker is killed in the middle."""

import os
import signal
import subprocess
import sys
import time
from urllib.parse import urlsplit, urlunsplit

import pytest
from django.db import connection

from apps.planning import services
from apps.planning.models import Decision, PlannerPolicy, SwitchOrder
from apps.topology.models import Node
from controlplane.env import ROOT
from tests.factories import actor_with

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True)]
ADA = actor_with("administrator", "ada")


@pytest.fixture
def worker(tmp_path):
    """Starts workers (with beat inside); kills what is left of them."""
    parts = urlsplit(os.environ["DATABASE_URL"])
    database = urlunsplit(parts._replace(path=f"/{connection.settings_dict['NAME']}"))
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "controlplane.settings", "DATABASE_URL": database}
    running = []

    def start():
        log = (tmp_path / f"worker-{len(running)}.log").open("w")
        schedule = str(tmp_path / "beat")
        command = [
            "-m",
            "celery",
            "-A",
            "controlplane",
            "worker",
            "--beat",
            "--schedule",
            schedule,
            "--concurrency",
            "2",
        ]
        command += ["--loglevel", "WARNING", "--queues", "switchyard.planner", "--without-gossip", "--without-mingle"]
        process = subprocess.Popen(
            [sys.executable, *command], env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for path in sorted(tmp_path.glob("worker-*.log")):
        print(path.read_text()[-2000:])


def test_a_forced_switch_is_driven_by_the_worker_and_survives_its_death(partition, yard, worker, wait_for):
    PlannerPolicy.objects.update(mode="automatic", slice_s=2, slices_per_window=5, cooldown_s=1)
    first = worker()
    services.force_node(Node.objects.get(name="gb300-3"), "prefill", ADA, "for a test")
    wait_for(lambda: yard.status("gb300-3")["phase"] == "prefill", 30)
    order = SwitchOrder.objects.get()
    wait_for(lambda: SwitchOrder.objects.get(pk=order.pk).state == "done", 30)

    # The agents are away, so the next switch is in the middle when the worker is killed.
    yard.stop()
    services.force_node(Node.objects.get(name="gb300-2"), "decode", ADA, "second")
    wait_for(lambda: Node.objects.get(name="gb300-2").draining, 20)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    yard.start()
    time.sleep(0.5)
    assert yard.status("gb300-2")["phase"] == "prefill", "nobody drives"
    worker()
    wait_for(lambda: yard.status("gb300-2")["phase"] == "decode", 40)
    wait_for(lambda: not Node.objects.get(name="gb300-2").draining, 20)
    # Beat ticks as well: an empty window is decided, and says why it holds.
    wait_for(lambda: Decision.objects.exists(), 30)
    assert Decision.objects.first().rule in ("forced", "too_few_slices")
