#!/bin/bash
mkdir -p /logs/verifier
reward=0
# The objects are read in a new repository: the agent's configuration and hooks are not used.
export GIT_DIR="$TMPDIR/copy"
git init -q --bare "$GIT_DIR"
rm -r "$GIT_DIR/objects" "$GIT_DIR/refs"
cp -r .git/objects .git/refs .git/HEAD "$GIT_DIR"
rm -rf "$GIT_DIR/objects/info"
if [ "$(git show HEAD:config.ini)" = "$(cat /tests/expected)" ] && [ "$(git rev-list --count HEAD)" -ge 3 ] &&
  [ "$(git log --format=%s --reverse | head -n 2)" = "$(printf 'Begin\nTidy up')" ]; then
  reward=1
fi
echo $reward >/logs/verifier/reward.txt
