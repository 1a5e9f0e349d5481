"""placement-audit: says which DTensor gradients lost, doubled or mis-scaled a reduction, and where."""

__version__ = "0.1.0"
