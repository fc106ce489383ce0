"""Objectives, priority bands, policies; `domain/` holds the pure machine: queues, fairness, ordering, saturation, dispatch."""
