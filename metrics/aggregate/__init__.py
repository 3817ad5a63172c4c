"""From raw lines to the figures of a window, with what was lost. Pure."""
