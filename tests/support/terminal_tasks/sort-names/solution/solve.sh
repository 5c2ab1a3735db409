#!/bin/bash
cd /app
export LC_ALL=C

grep -v '^$' names.txt | sort -u >sorted.txt
