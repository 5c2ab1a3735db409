#!/bin/bash
rename_one() { mv -- "$1" "${1%.jpeg}.jpg"; }

cd photos

find . -name '*.jpeg' -print0 | while IFS= read -r -d '' each; do rename_one "$each"; done
