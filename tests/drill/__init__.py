"""The drill: named faults, executed on real brokers, each with what the operator sees and the way back.

In: the faults of this package (`@fault`), and the transcripts in docs/operations, which are the ways back. Out: a row
per fault, and one JSON object. A family of faults shares one site: a broker, a stack, or a broker with logins. Begin
with `fault.py`; `page.py` runs the transcripts, `__main__.py` plays the whole.

    make drill [ARGS='-k changelog']
"""
