"""Small pure helpers for text. They import nothing else of this project.

In: strings and files. Out: words, shortened text, timestamps, parsed YAML and TOML. Begin with `words.py`.
"""
