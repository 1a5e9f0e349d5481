"""Edits the user's own source: whole or not at all, shown first, and taken back on request. Knows no torch."""
