"""Installs the fix on import, for a job's ``experimental.custom_import = "placement_audit.fix.auto"``."""

from placement_audit.fix.install import install

install()
