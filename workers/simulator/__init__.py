"""A cluster in virtual time: the gateway's own machines (`workers/yard`, `apps/*/domain`), with engines and wire modelled.

`clock` orders what happens; `node` is one engine with its pool and links; `partition` drives one yard and its nodes;
`clients` play harness scripts closed-loop; `planners` decide about the split; `systems` says which policies make which
system; `recorder` counts; `faults` breaks things; `cluster` runs partitions as processes; `workloads/` makes scripts;
`experiments/` measures published tables. Imports no web code; no policy lives here that the gateway could use.
"""
