"""A whole pipeline in one TOML file: collectors, tables and jobs, for one machine or for many."""
