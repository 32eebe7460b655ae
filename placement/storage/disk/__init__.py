"""Host copies that leave host memory for files on a local disk, and come back before anybody needs them."""
