"""A simulated accelerator: CPU tensors with real numbers that are in a GPU's memory for all that Python sees."""
