import os

# Before torch loads OpenMP: threads that wait must sleep, not spin. The trainer shares its cores with the model server
# and Kafka, and spinning there makes a step ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
