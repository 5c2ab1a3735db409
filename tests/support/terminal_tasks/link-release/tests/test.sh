#!/bin/bash
mkdir -p /logs/verifier
reward=0
[ "$(readlink current)" = releases/1.10 ] && [ ! -L latest.txt ] && cmp -s latest.txt /tests/expected && reward=1
echo $reward >/logs/verifier/reward.txt
