"""Common parts of the kernels for TPUs."""
