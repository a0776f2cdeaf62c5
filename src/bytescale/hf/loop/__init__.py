"""``HDP``: hybrid data parallelism in a loop that is not ours."""
