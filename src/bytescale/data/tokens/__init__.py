"""Text becomes tokens: tokenizers, ``.bin/.idx`` pairs, and the cache of tokenised parts."""
