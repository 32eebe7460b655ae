"""The structure of tensors: plain storages, sparse parts, wrappers around them; and how an object
names the tensors it owns."""
