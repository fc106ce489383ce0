"""What beat starts exists, and a worker finds it."""

from celery.beat import Scheduler

from controlplane.celery import app
from workers.planner.schedule import BEAT_SCHEDULE


def test_every_scheduled_task_is_known_to_the_worker():
    app.loader.import_default_modules()
    assert {entry["task"] for entry in BEAT_SCHEDULE.values()} <= set(app.tasks)
    assert "workers.planner.tasks.drive_switch" in app.tasks


def test_beat_reads_the_schedule_and_lets_no_backlog_grow():
    app.loader.import_default_modules()
    entries = Scheduler(app=app, lazy=False).schedule
    assert {"tick", "reconcile", "prune"} <= set(entries)
    assert all(
        entry.options["expires"] <= entry.schedule.seconds for name, entry in entries.items() if name in BEAT_SCHEDULE
    )
