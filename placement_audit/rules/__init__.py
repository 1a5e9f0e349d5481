"""The rules: their texts, and the functions that turn a judged trace into findings.

`catalogue` holds the texts (`explain` prints them); `boundary` and `gradient` make the findings.
"""

from placement_audit.rules.catalogue import RULES, UnknownRuleError, get_rule
from placement_audit.rules.explain import rule_text, rules_table
from placement_audit.rules.rule import Link, Rule

__all__ = ["RULES", "Link", "Rule", "UnknownRuleError", "get_rule", "rule_text", "rules_table"]
