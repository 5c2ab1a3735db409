#!/bin/bash
newest=$(ls releases | sort -V | tail -n 1)

ln -s "releases/$newest" current

cp current/notes.txt latest.txt
