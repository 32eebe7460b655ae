"""A CUDA GPU: virtual memory by the driver, pinned host memory, streams, and torch's allocator over a range."""
