#!/bin/bash
tar tzf backup.tar.gz

mkdir restored

tar xzf backup.tar.gz -C restored --wildcards '*.conf'
