"""Searches with Optuna: the search space, proposals, the study, and the loop that runs the proposed jobs."""
