"""``make check-cuda``: what of the GPU code can be shown without a GPU."""
