"""Parts of `placement explain`: why a policy has each handle where it is, in a cycle that it knows and in a running worker."""
