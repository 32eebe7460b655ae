"""A device in host memory, with the contract of an accelerator."""
