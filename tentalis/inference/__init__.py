"""Inference: the token-exact protocol, its HTTP client, and our own small server."""

import os

# Read by OpenMP when torch is imported. By default its threads spin while they wait for each other; with other busy
# processes on the machine that made a decoding step 10 to 20 times slower (2 cores, load 10: 4.7 s against 0.3 s),
# while sleeping costs a fifth on an idle machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
