"""The receiving side: decoding, reordering, gaps and their repair."""
