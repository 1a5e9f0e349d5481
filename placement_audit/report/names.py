"""Names of like parameters, folded: ``layers.*.ffn_norm.weight``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PARAM = "{param}"
"""Stands for a parameter's own name where sentences of several parameters are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters that share a name pattern.

    Attributes:
        name: ``layers.*.ffn_norm.weight``, ``layers.{0-2,4}.ffn_norm.weight`` where the model has more
            of them, or the name itself where it is one.
        fqns: the parameters, in the model's order.
    """

    name: str
    fqns: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} ({len(self.fqns)})" if len(self.fqns) > 1 else self.name


def pattern(name: str) -> str:
    """``layers.3.ffn_norm.weight`` -> ``layers.*.ffn_norm.weight``."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def group_names(names: Iterable[str], universe: Iterable[str]) -> tuple[Group, ...]:
    """Group ``names`` by pattern, in the order of first appearance.

    Args:
        names: what to group.
        universe: all names there are; a group that leaves some of its pattern out shows which it has.
    """
    of_pattern = Counter(pattern(n) for n in dict.fromkeys(universe))
    groups: dict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):
        groups[pattern(name)].append(name)
    return tuple(
        Group(name=_display(key, found, of_pattern[key]), fqns=tuple(found)) for key, found in groups.items()
    )


def _display(key: str, found: Sequence[str], of_pattern: int) -> str:
    if len(found) == 1:
        return found[0]
    if len(found) >= of_pattern:
        return key
    split = [n.split(".") for n in found]
    parts, product = [], 1
    for i, part in enumerate(key.split(".")):
        numbers = sorted({int(s[i]) for s in split}) if part == "*" else []
        product *= len(numbers) or 1
        parts.append(_ranges(numbers) if numbers else part)
    # braces read as "all combinations"; where that would be untrue, or long, the star must do
    return ".".join(parts) if product == len(found) and max(map(len, parts)) <= 24 else key


def _ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 4]`` -> ``{0-2,4}``; a single number stands alone."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    spelled = (str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    return "{" + ",".join(spelled) + "}"


def general(text: str, fqn: str | None) -> str:
    """``text`` with `PARAM` in place of the parameter's name."""
    return text.replace(fqn, PARAM) if fqn else text
