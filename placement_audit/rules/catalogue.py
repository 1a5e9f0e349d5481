"""All rules, and how to find one."""

from __future__ import annotations

import difflib

from placement_audit.rules.rule import Rule
from placement_audit.rules.texts_boundary import BOUNDARY_RULES
from placement_audit.rules.texts_dtype import DTYPE_RULES
from placement_audit.rules.texts_gradient import GRADIENT_RULES
from placement_audit.rules.texts_hygiene import HYGIENE_RULES
from placement_audit.rules.texts_loss import LOSS_RULES
from placement_audit.rules.texts_measured import MEASURED_RULES
from placement_audit.rules.texts_readers import READER_RULES, SELF_RULES
from placement_audit.rules.texts_values import VALUE_RULES

RULES: tuple[Rule, ...] = (
    *HYGIENE_RULES,
    *BOUNDARY_RULES,
    *LOSS_RULES,
    *VALUE_RULES,
    *GRADIENT_RULES,
    *MEASURED_RULES,
    *READER_RULES,
    *DTYPE_RULES,
    *SELF_RULES,
)
"""Every rule, by id."""

_BY_KEY = {key: rule for rule in RULES for key in (rule.id.lower(), rule.name)}


class UnknownRuleError(KeyError):
    """No such rule; the message names the near ones.

    Attributes:
        message: for the user.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        # KeyError would show the repr, quotes and all
        return self.message


def get_rule(id_or_name: str) -> Rule:
    """The rule with this id ("PA201", in any case) or name ("lost-reduction").

    Raises:
        UnknownRuleError: a KeyError; there is none, and the message names the near ones.
    """
    key = id_or_name.strip().lower()
    found = _BY_KEY.get(key)
    if found is not None:
        return found
    near = difflib.get_close_matches(key, _BY_KEY, n=3, cutoff=0.6)
    rules = dict.fromkeys(_BY_KEY[n] for n in near)
    hint = " or ".join(f"{r.id} {r.name}" for r in rules)
    more = f"did you mean {hint}?" if hint else "`placement-audit rules` lists them."
    raise UnknownRuleError(f"There is no rule {id_or_name!r}; {more}")
