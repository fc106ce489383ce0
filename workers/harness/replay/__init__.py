"""Closed-loop replay of recorded agent sessions through a real gateway: `python -m workers.harness.replay --help`.

`sessions` reads recordings, `blocks` works on their block ids, `traffic` sends one request, `agents` plays sessions,
`summary` counts, `options` is the command line. `data/` holds a packaged excerpt of real sessions and its provenance.
"""
