"""Takedowns, jobs, modules and the audit trail: one SQLite database, and the folders of module files."""
