"""Where the bytes of a registered object lie, on a device and on the host. Knows no kind of device."""
