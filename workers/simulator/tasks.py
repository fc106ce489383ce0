"""Simulations as Celery jobs. Thin: the question comes in as JSON values, the answer lies in the job's file."""

from __future__ import annotations

from typing import Any

from celery import shared_task

from controlplane import env
from workers.simulator.capacity import Job, Question


@shared_task(name="simulator.plan_capacity", acks_late=False)
def plan_capacity(job_id: str, question: dict[str, Any]) -> dict[str, Any]:
    """Answer a capacity question; `data/capacity/{job_id}.json` tells its progress, `Job.cancel` stops it."""
    return Job(env.data_folder() / "capacity", job_id).run(Question.parse(question))
