"""Uses of an object while its bytes are on the host: reads, writes, replaced tensors, gradients that were zeroed."""
