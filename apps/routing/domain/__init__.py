"""Pure routing. May import `apps.kvcache.domain` and `apps.planning.domain`; time is an argument.

`router` chooses nodes; `views` are what it is shown and what it answers; `ttft` predicts; `policies` are ours and the
baselines behind one interface; `loads` counts every node's load from the moment of a decision.
"""
