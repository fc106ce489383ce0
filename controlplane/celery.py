"""The Celery application. Tasks and schedule live in `workers/planner`; a lost worker's task returns within seconds."""

from __future__ import annotations

import os
import warnings
from typing import Any

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

from controlplane import env, redis_client

# Tasks travel as JSON only; the default run of a root user is warned about nothing else.
warnings.filterwarnings("ignore", message="You're running the worker with superuser privileges")
VISIBILITY_TIMEOUT_S = 10


def broker_url(redis_url: str) -> str:
    """kombu's name for a Redis URL: it calls a unix socket `redis+socket://` and its database `virtual_host`."""
    if redis_url.startswith("unix://"):
        path, _, query = redis_url.removeprefix("unix://").partition("?db=")
        return f"redis+socket://{path}?virtual_host={query or '0'}"
    return redis_url


class Application(Celery):
    """Celery that hands nothing to a broker which has just left this process without an answer (it is the same Redis)."""

    def send_task(self, *arguments: Any, **options: Any) -> Any:
        redis_client.answers().expected()
        return super().send_task(*arguments, **options)


app = Application(
    "switchyard",
    broker=broker_url(env.redis_url() or "redis://127.0.0.1:6379/0"),
    include=["workers.planner.tasks", "workers.planner.alerts", "workers.simulator.tasks"],
)
app.conf.update(
    task_ignore_result=True,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_default_queue="switchyard.planner",
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
    timezone="UTC",
    # The task of a worker that was killed returns when its message has been unacknowledged for the visibility timeout
    # and the next sweep finds it: within 12 s. kombu sweeps every interval * throttle = 100 s unless told otherwise.
    # A task that runs longer is delivered a second time; every task stands that, for it takes a lock or a row first.
    broker_transport_options={
        "visibility_timeout": VISIBILITY_TIMEOUT_S,
        "unacked_restore_interval": 2,
        "unacked_restore_throttle": 1,
        "unacked_restore_limit": 100,
        "socket_timeout": 30,
    },
)


def send_within(seconds: float, application: Celery = app) -> None:
    """For a process that serves people: a task that the broker does not take in this time is not sent, and not retried.

    Workers must wait longer: they block in their reads.
    """
    application.conf.broker_transport_options = application.conf.broker_transport_options | {
        "socket_timeout": seconds,
        "socket_connect_timeout": seconds,
        "max_retries": 0,
    }


# One definition for the supervisor, the images and the tests.
WORKER_ARGUMENTS = [
    "--loglevel",
    "WARNING",
    "--concurrency",
    "3",
    "--without-gossip",
    "--without-mingle",
    "--queues",
    "switchyard.planner",
]
