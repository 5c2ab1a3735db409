#!/bin/bash
cat report.sh

sed -i 's/^lines=1/lines=0/; s/sum - amount/sum + amount/' report.sh

bash report.sh <sales.csv
