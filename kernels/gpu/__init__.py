"""Choice of the implementation, and what kernels for GPUs share."""
