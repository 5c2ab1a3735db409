#!/bin/bash
mkdir -p /logs/verifier
reward=0
if [ "$(find restored ! -type d | LC_ALL=C sort)" = "$(printf 'restored/etc/main.conf\nrestored/etc/site/a.conf')" ] &&
  [ "$(cat restored/etc/main.conf restored/etc/site/a.conf)" = "$(printf 'main\na')" ]; then
  reward=1
fi
echo $reward >/logs/verifier/reward.txt
