"""Published tables and our own claims, measured in the simulator: `manage.py experiment NAME`.

`runs` is one simulated run as data, kept once it is made; `shapes` is what an experiment consists of, with the published
figures; `stationary_load`, `other_loads` and `own_claims` say which runs make which experiment, `registry` names them;
`report` writes JSON, a table and a page. Nothing is tuned per table: one set of coefficients a model, and a figure that
disagrees stays visible with its reason.
"""
