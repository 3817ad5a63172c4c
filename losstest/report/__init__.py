"""The results as a table, as HTML and as charts."""
