#!/bin/bash
mkdir -p /logs/verifier
reward=0
stat -c '%a %n' bin/* secrets secrets/key secrets/old/key >"$TMPDIR/found"
cmp -s "$TMPDIR/found" /tests/expected && reward=1
echo $reward >/logs/verifier/reward.txt
