#!/bin/bash
grep -hw ERROR logs/*.log

grep -hw ERROR logs/*.log | awk '{ print $3 }' | sort | uniq -c | sort -rn | awk '{ print $1, $2 }' >errors.txt
