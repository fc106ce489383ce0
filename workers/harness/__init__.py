"""What an agent harness imports to send branch signals (`client`), and the replay of recorded sessions (`replay`).

Nothing here imports the rest of Switchyard: a harness needs this folder, aiohttp for the async client, and no more.
"""
