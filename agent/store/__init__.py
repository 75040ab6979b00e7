"""Durable entries. SQLite here; a replicated store beside it comes with its own part of the project."""
