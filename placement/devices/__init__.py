"""Accelerators behind one contract (`base`): a CUDA GPU, a simulated device, and the host memory
that both copy to and from."""
