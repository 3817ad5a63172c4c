"""The remote tier of a spool: immutable, numbered parts in an object store."""
