"""`manage.py capacity best-split|max-load|nodes-needed`: what a cluster carries, found by simulation."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any
from uuid import uuid4

from django.core.management.base import BaseCommand, CommandError

from controlplane import env
from workers.simulator.capacity import KINDS, Job, Planner, Question, QuestionError
from workers.simulator.experiments.runs import Cancelled
from workers.simulator.hardware import GLM
from workers.simulator.tasks import plan_capacity


class Command(BaseCommand):
    help = "Find the best split, the most load under an SLO, or how many nodes are needed."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("kind", help=f"one of {', '.join(KINDS)}")
        add("--workload", default="CC")
        add("--hardware", default=GLM)
        add("--nodes", type=int, default=9)
        add("--agents", type=int, default=90)
        add("--slo-ttft", type=float, default=15.0, help="seconds that the P95 TTFT may take")
        add("--warm-up", type=float, default=600.0)
        add("--seconds", type=float, default=900.0)
        add("--seed", type=int, default=1)
        add("--job", action="store_true", help="leave it to the planner's workers and print the job's id")

    def handle(self, *args: Any, **options: Any) -> None:
        document = {
            "kind": options["kind"], "workload": options["workload"], "hardware": options["hardware"],
            "nodes": options["nodes"], "agents": options["agents"], "slo_ttft_s": options["slo_ttft"],
            "warm_up_s": options["warm_up"], "scored_s": options["seconds"], "seed": options["seed"],
        }  # fmt: skip
        try:
            question = Question.parse(document)
        except QuestionError as problem:
            raise CommandError(str(problem)) from None
        job_id = f"capacity-{uuid4().hex[:12]}"
        if options["job"]:
            plan_capacity.delay(job_id, document)
            self.stdout.write(job_id)
            return

        def progress(share: float, text: str) -> bool:
            filled = round(30 * share)
            self.stderr.write(f"\r[{'#' * filled}{'.' * (30 - filled)}] {text:<40}", ending="")
            return True

        try:
            answer = Planner(question, progress).run()
        except (Cancelled, KeyboardInterrupt):
            self.stderr.write("\nstopped")
            raise SystemExit(130) from None
        self.stderr.write("")
        Job(env.data_folder() / "capacity", job_id).keep(answer.as_dict())
        self.stdout.write(json.dumps(answer.as_dict(), indent=1))
