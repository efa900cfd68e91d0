"""The seam to the framework that computes: arrays and tensors, variables, compiled functions."""
