"""Layer 5: checkpoints. How they are written, published, read on any mesh, and exchanged with Hugging Face folders."""
