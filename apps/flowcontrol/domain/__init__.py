"""Pure flow control. Imports only the standard library and this package; time is an argument.

`controller` is the machine; `events` and `commands` are what it hears and says; `config` what an operator edits;
`bands`, `fairness`, `metered_fairness` and `ordering` decide who is next; `saturation` whether there is room; `capacity`
who may wait; `snapshot` what a page shows; `llmd` reads and writes llm-d's YAML.
"""
