"""Edits of a libcst tree by node identity: replace, drop and insert, and leave every other byte alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import libcst as cst

from placement_audit.mend.flow import Flow, Statement


@dataclass(slots=True)
class Edits:
    """What to do to a tree.

    Attributes:
        replace: new nodes, by identity of the old.
        change: what to do to a node, by its identity, once all in it is done.
        drop: statements to take out; comments above them move to the statement that follows.
        insert: statements to put before one, by its identity.
        above: lines to put above a statement's own comments, by its identity.
        ours: comment lines that go with a dropped statement.
    """

    replace: dict[int, cst.CSTNode] = field(default_factory=dict)
    change: dict[int, Callable[[cst.CSTNode], cst.CSTNode]] = field(default_factory=dict)
    drop: set[int] = field(default_factory=set)
    insert: dict[int, list[Statement]] = field(default_factory=dict)
    above: dict[int, list[cst.EmptyLine]] = field(default_factory=dict)
    ours: frozenset[str] = frozenset()

    def apply(self, module: cst.Module, flow: Flow) -> cst.Module:
        """The edited tree; ``flow`` knows the statements that are named."""
        lines = dict(self.above)
        for siblings in {id(place.siblings): place.siblings for place in flow.places.values()}.values():
            kept: list[cst.EmptyLine] = []
            for statement in siblings:
                if not isinstance(statement, cst.SimpleStatementLine | cst.BaseCompoundStatement):
                    continue
                if id(statement) in self.drop:
                    kept += [line for line in statement.leading_lines if not self._is_ours(line)]
                elif kept:
                    lines[id(statement)] = kept
                    kept = []
        return module.visit(_Editor(self, lines))

    def _is_ours(self, line: cst.EmptyLine) -> bool:
        return line.comment is not None and line.comment.value in self.ours


class _Editor(cst.CSTTransformer):
    def __init__(self, edits: Edits, lines: dict[int, list[cst.EmptyLine]]) -> None:
        super().__init__()
        self._edits = edits
        self._lines = lines

    def on_leave(self, original_node, updated_node):  # type: ignore[override]
        key = id(original_node)
        if key in self._edits.replace:
            return self._edits.replace[key]
        if key in self._edits.change:
            return self._edits.change[key](updated_node)
        if key in self._edits.drop:
            return cst.RemoveFromParent()
        if key in self._lines:
            lines = [*self._lines[key], *updated_node.leading_lines]
            updated_node = updated_node.with_changes(leading_lines=lines)
        if key in self._edits.insert:
            return cst.FlattenSentinel([*self._edits.insert[key], updated_node])
        return updated_node


def without(call: cst.CSTNode, keyword: str) -> cst.Call:
    """A call without one keyword argument."""
    assert isinstance(call, cst.Call)
    gone = next(arg for arg in call.args if arg.keyword is not None and arg.keyword.value == keyword)
    args = [arg for arg in call.args if arg is not gone]
    if not args:
        return call.with_changes(args=args, whitespace_before_args=cst.SimpleWhitespace(""))
    if gone is call.args[-1]:
        args[-1] = args[-1].with_changes(comma=gone.comma, whitespace_after_arg=gone.whitespace_after_arg)
    return call.with_changes(args=args)


def statements(texts: Sequence[str], indent: str) -> list[Statement]:
    """Parse statements written with a tab an indent."""
    return [cst.parse_statement(text.replace("\t", indent)) for text in texts]
