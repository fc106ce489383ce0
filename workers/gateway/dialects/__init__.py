"""Other APIs on top of chat completions: their requests become chat bodies, chat answers become theirs. Pure.

`reading.py` has the checks that name a bad field, `messages_request.py` and `messages_answer.py` are Anthropic's
`/v1/messages`, `responses_request.py` and `responses_answer.py` OpenAI's `/v1/responses`. An answer translator takes chat
chunks as dicts, in order, and gives server-sent events; the same translator builds the answer that is not streamed.
"""
