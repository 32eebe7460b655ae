"""Megatron-Core: its DistributedDataParallel, its optimizers, and Megatron-FSDP."""
