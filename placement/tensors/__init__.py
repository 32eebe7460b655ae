"""What a tensor is made of: plain storages, sparse parts, wrappers around them; and how an object names those it owns."""
