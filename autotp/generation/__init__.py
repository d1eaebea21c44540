"""What `generate()` runs on a parallelized model: a decoding loop of our own, over static memory and CUDA graphs."""
