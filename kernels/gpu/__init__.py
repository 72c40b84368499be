"""Choice of the implementation, and common parts of the kernels for GPUs."""
