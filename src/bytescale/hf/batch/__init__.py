"""The documents of a global batch: planned, cut for ranks, and whole again."""
