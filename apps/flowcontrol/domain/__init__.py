"""Pure flow control. Imports only the standard library, numpy and this package; time is an argument.

`controller` is the machine; `events` and `commands` are what it hears and says; `config` what an operator edits;
`bands`, `fairness` and `ordering` decide who is next; `saturation` whether there is room; `snapshot` what a page shows.
"""
