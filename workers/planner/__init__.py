"""The planner's worker: thin Celery tasks, the schedule, per-partition locks, and the client of the node agents.

Tasks load state, call `apps.planning` and send what it answers; every rule lives there. They are plain functions as well,
so tests call them without a broker.
"""
