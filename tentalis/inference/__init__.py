"""Inference: the token-exact protocol, its HTTP client, and a small server with vLLM's wire format.

In: chat messages or token ids. Out: sampled tokens with their log-probs, or the log-probs of given tokens.
Begin with protocol.py (the interface) and client.py; the server is server.py, then api.py, then engine.py.
"""

import os

# OpenMP reads this when torch is imported. By default its threads spin while they wait for each other. Next to other
# busy processes, spinning made a decoding step 10 to 20 times slower (2 cores, load 10: 4.7 s against 0.3 s); sleeping
# costs a fifth on an idle machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
