"""Parsers of what others wrote, fed with what nobody would write."""
