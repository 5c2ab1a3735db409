#!/bin/bash
git log --stat --oneline

git checkout HEAD~1 -- config.ini

git commit -m 'Bring config.ini back'
