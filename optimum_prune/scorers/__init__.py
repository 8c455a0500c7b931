"""Scores of weights, as pure functions of tensors: one file per scorer, found by its name."""
