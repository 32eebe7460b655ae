"""Ownership: the tensors that a module or an optimizer owns, and the objects that placement
refuses."""
