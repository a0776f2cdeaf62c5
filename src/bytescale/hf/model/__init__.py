"""A decoder of transformers on our attention: what it is, what is refused, its head, its passes, and what it costs."""
