"""A simulated device in host memory, with the contract of an accelerator."""
