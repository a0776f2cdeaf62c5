"""A decoder's files: read, written, converted, adapted in part, and streamed."""
