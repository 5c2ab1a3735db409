#!/bin/bash
mkdir -p /logs/verifier
reward=0
# The script was run with other lines before the checks, where it cannot reach them.
[ "$(cat /logs/runs/other.code)" = 0 ] && cmp -s /logs/runs/other.out /tests/expected && reward=1
echo $reward >/logs/verifier/reward.txt
