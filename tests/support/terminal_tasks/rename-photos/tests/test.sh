#!/bin/bash
mkdir -p /logs/verifier
reward=0
(cd photos && find . -type f | LC_ALL=C sort | while IFS= read -r each; do echo "$each $(cat "$each")"; done) >"$TMPDIR/found"
cmp -s "$TMPDIR/found" /tests/expected && reward=1
echo $reward >/logs/verifier/reward.txt
