"""What an agent harness imports to send branch signals, and the replay of recorded sessions. See `docs/harness.md`.

    client        branches, their headers and their ends; sync (standard library) and async (aiohttp)
    hooks         the signals on every request of OpenAI's and Anthropic's Python clients (httpx)
    claude_code   hooks for Claude Code and their configuration (standard library)
    replay        recorded sessions played as agents

Nothing here imports the rest of Switchyard.
"""
