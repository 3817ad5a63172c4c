"""Rows of Spark as events: in a journal, or sent by a publisher; each batch once."""
