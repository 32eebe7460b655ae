"""Registration: turn a user's object into a handle, guard it against use while offloaded, and show
its state dict in every state."""
