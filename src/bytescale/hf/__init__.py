"""Layer 6: hybrid data parallelism for decoders of transformers, for the trainer and for loops that are not ours.

``HDP`` (``hf.loop.hdp``) attaches to a model of Hugging Face's transformers. It plans every global batch, gives each
rank its rows of it, computes attention across ranks, and updates the weights with sharded optimizer states. The loop,
the batch and the loss remain the caller's.
"""
