"""Which powers of two weights, activations and gradients take, and what of them float16 can hold."""
