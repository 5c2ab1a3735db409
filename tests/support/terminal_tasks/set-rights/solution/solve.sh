#!/bin/bash
chmod 755 $(grep -l '^#!' bin/*)

chmod 700 secrets
find secrets -type f -exec chmod 600 {} +
