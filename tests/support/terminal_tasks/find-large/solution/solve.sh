#!/bin/bash
find data -type f -size +100c | sort >large.txt
