"""``make check-cuda``: the checks of the GPU code that need no GPU."""
