"""Host memory of exact size, reserved in the background and shared between processes."""
