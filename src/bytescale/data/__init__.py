"""Layer 4: readers, tokenising, global batches and the local loader.

Nothing here imports torch, and only ``data.remote`` imports Ray.
"""
