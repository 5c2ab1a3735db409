#!/bin/bash
awk -F, 'NR > 1 { sum[$1] += $2 } END { for (user in sum) print user "," sum[user] }' usage.csv |
  sort -t, -k2,2nr >totals.csv
