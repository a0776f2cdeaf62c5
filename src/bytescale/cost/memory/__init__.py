"""Peak memory of a micro-batch, part by part: what fits is known before anything runs.

What layers need of a row is measured (``hf.model.measure``); weights, states, logits and ring buffers are counted.
"""
