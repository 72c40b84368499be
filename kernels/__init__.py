"""Inner loops of the codecs, a folder an operation: jnp references and kernels."""
