"""Scores the recorded answers of a run again, with another verifier or other checks.

In: the results on the log. Out: Scores on the halves log, beside the old ones. The join counts them as late and no
run trains on them, except a counterfactual (`tentalis replay --verifier`). Begin reading with `core`.
"""
