"""The environment openenv: episodes on a server of OpenEnv, over its WebSocket.

In: a task and the policy's turns. Out: the server's observations and rewards. Begin reading in `environment`; `client`
speaks the protocol of openenv-core.
"""
