"""Find out what tensors an object owns, where they lie, and who else uses them."""
