"""A CUDA GPU: the driver's virtual memory, pinned host memory, streams, and torch's allocator over
a range."""
