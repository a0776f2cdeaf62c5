"""Log-probabilities of documents, and caches of prompts."""
