"""What each command does, one module each; `placement_audit.cli` chooses.

Heavy imports are inside the functions: --help, --version, rules, explain RULE and report import no torch.
"""
