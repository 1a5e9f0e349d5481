"""Adapters: a user's job -> `placement_audit.case.Case`, one adapter an era of torchtitan.

`titan02` is for the TOML jobs of torchtitan 0.2.0 to 0.2.2, `titan03` for the Python ones of 0.3. All that touches
torchtitan lives here; `placement_audit.build` chooses.
"""
