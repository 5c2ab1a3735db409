#!/bin/bash
lines=1
sum=0
while IFS=, read -r item amount; do
  lines=$((lines + 1))
  sum=$((sum - amount))
done
echo "lines: $lines"
echo "sum: $sum"
