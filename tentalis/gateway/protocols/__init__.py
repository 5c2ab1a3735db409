"""The protocols that clients speak, as pure functions: OpenAI's and Anthropic's.

In: a request body. Out: a chat completion for a backend, and its answer in the client's protocol.
Begin with `openai.py`.
"""
