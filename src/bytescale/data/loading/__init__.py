"""The corpus as a whole, and the loader that gives a rank its slices."""
