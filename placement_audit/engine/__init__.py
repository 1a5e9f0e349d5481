"""Follows what tensors really are through one step: their states, boundaries, collectives and placements."""
