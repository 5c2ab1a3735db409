"""vLLM as the model server: its command line, its environment, and what it needs from us to be exact.

In: the options of `tentalis serve vllm`. Out: a command and an environment that start vLLM for training.
Begin with command.py. plugin.py runs inside vLLM; tentalis/local/vllm_server.py starts the process and watches it.
"""
