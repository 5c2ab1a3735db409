#!/bin/bash
mkdir -p /logs/verifier
reward=0
cmp -s errors.txt /tests/expected && reward=1
echo $reward >/logs/verifier/reward.txt
