"""Published tables and our own claims, measured in the simulator: `manage.py experiment NAME`.

`runs` is one simulated run as data, kept once it is made; `registry` says which runs make which experiment and what the
publication says; `report` writes JSON, a table and a page. Nothing is tuned per table: one set of coefficients a model, and
a figure that disagrees stays visible with its reason.
"""
