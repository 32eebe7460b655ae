"""torch's own wrappers around modules: DDP, FSDP1, FSDP2, compiled and checkpointed modules."""
