"""Container images: their names, and the engines that build them."""
