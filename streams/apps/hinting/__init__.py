"""Hinting: feedback becomes the OPD half.

In: results and feedback. Out: Hint records on the halves topic. Begin with `processor.py`.
"""
