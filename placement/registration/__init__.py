"""From an object of the user to a handle: registration, guards against use while offloaded, state dicts in every state."""
