"""Simulations as Celery jobs. Thin: the question comes in as JSON values, the answer lies in the job's file."""

from __future__ import annotations

from typing import Any

from celery import shared_task

from apps.planning import experiments
from controlplane import env
from controlplane.jobs import Progress, gently
from workers.simulator.capacity import Job, Question
from workers.simulator.experiments.making import make
from workers.simulator.experiments.report import write
from workers.simulator.experiments.runs import Cancelled


@shared_task(name="simulator.plan_capacity", acks_late=False)
def plan_capacity(job_id: str, question: dict[str, Any]) -> dict[str, Any]:
    """Answer a capacity question; `data/capacity/{job_id}.json` tells its progress, `Job.cancel` stops it."""
    asked = Question.parse(question)
    return gently(lambda: Job(env.data_folder() / "capacity", job_id).run(asked))


@shared_task(name=experiments.TASK, acks_late=False)
def run_experiment(name: str, quick: bool) -> dict[str, Any]:
    """Make an experiment's missing runs and write its report; its job tells the progress and can be cancelled."""
    folder = experiments.folder()

    def work(progress: Progress) -> dict[str, Any]:
        try:
            report = make(name, folder, quick=quick, progress=progress)
        except Cancelled:
            return {}
        write(report, folder)
        return {}

    return gently(lambda: experiments.job(name).carry_out({"quick": quick}, work))
