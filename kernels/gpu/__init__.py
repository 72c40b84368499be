"""Choice of the implementation, and parts that the kernels for GPUs share."""
