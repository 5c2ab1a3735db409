"""Plays one episode in the terminal (`tentalis env try`): by hand, with a model server, or by a program of its own.

In: an environment, a task of one message, a player. Out: each message, reward and the score, as text. Begin reading in
`play`; `relay` stands between a program and the model server.
"""
