"""Sequence and loss kernels; knows nothing of the rest of the package."""
