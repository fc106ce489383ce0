"""Tasks that look at every partition for alerts and samples, and send what channels are owed."""

from __future__ import annotations

import time

from apps.telemetry import alerting, webhooks
from apps.topology.models import Partition
from controlplane.celery import app
from workers.planner.locks import partition_lock


@app.task
def watch_all() -> int:
    """Evaluates the alert rules of every partition and sends due webhooks; returns how many alerts changed."""
    changed = 0
    for partition in Partition.objects.order_by("name"):
        with partition_lock("watch", partition.pk) as mine:
            if mine:
                changed += len(alerting.watch(partition, time.time()))
    webhooks.deliver_due()
    return changed
