"""Where flushes go."""
