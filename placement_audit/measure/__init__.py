"""Evidence from real ranks: real values, a model on one device to compare with, and numbers.

::

    prepare -> (the caller runs the step under Prepared.watching, or unwatched) -> finish -> Measurement

All of it runs on every rank, for most of it is collective; the model on one device lives on rank 0.
"""
