"""Claude Code behind Switchyard: hooks that say what its requests do not (`hook.py`), and their configuration (`settings.json`).

Claude Code's requests already carry its session and, for a sub-agent, the agent's id. The hooks add the three moments that no
request shows: a sub-agent stopped, the context is about to be compacted, the session ended. How to install them is in
`docs/harness.md`. `hook.py` is one file that needs nothing but Python's standard library.
"""
