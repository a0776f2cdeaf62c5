"""Peak memory of a micro-batch, part by part, from the model's shape: what fits is known before anything runs.

The counts follow what autograd really saves; tests/cost/test_memory.py compares them with counted tensors.
"""
