"""Writes an expression of a later statement so that it can stand earlier: names made in between are written out."""

from __future__ import annotations

import libcst as cst

from placement_audit.mend.flow import Flow, Statement, dotted, nodes


class TooLate(Exception):
    """A name is made in between, of something that may not be done earlier; the message is the name."""


def unfolded(flow: Flow, node: cst.BaseExpression, at: Statement, first: Statement) -> cst.BaseExpression:
    """Write an expression out.

    Args:
        flow: the function.
        node: the expression.
        at: the statement that it is in.
        first: the statement that it is to stand before.

    Raises:
        TooLate: it cannot be.
    """
    made = node.visit(_Unfold(flow, at, first))
    assert isinstance(made, cst.BaseExpression)
    return made


class _Unfold(cst.CSTTransformer):
    def __init__(self, flow: Flow, at: Statement, first: Statement) -> None:
        super().__init__()
        self._flow, self._at, self._first = flow, at, first

    def visit_Attribute_attr(self, node: cst.Attribute) -> None:
        self._skip = node.attr

    def visit_Arg_keyword(self, node: cst.Arg) -> None:
        self._skip = node.keyword

    _skip: cst.CSTNode | None = None

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        if original_node is self._skip:
            return updated_node
        binding = self._flow.binding(original_node.value, self._at)
        before = self._flow.binding(original_node.value, self._first)
        if binding is before or (binding and before and binding.statement is before.statement):
            return updated_node  # the same thing at both places: a global, an argument, or bound before the first
        value = binding.value if binding else None
        if binding is None or value is None or not _is_pure(value):
            raise TooLate(original_node.value)
        made = value.visit(_Unfold(self._flow, binding.statement, self._first))
        assert isinstance(made, cst.BaseExpression)
        closed = (
            isinstance(made, cst.Name | cst.Attribute | cst.Subscript | cst.Call | cst.Integer) or made.lpar
        )
        return made if closed else made.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def _is_pure(value: cst.BaseExpression) -> bool:
    return all(
        type(n) in _PURE and (type(n) is not cst.Call or dotted(n.func) == "tuple") for n in nodes(value)
    )


# What may be computed earlier than it is written: names, attributes, slices, tuple(...).
_PURE = {
    *(
        cst.Name,
        cst.Attribute,
        cst.Subscript,
        cst.SubscriptElement,
        cst.Slice,
        cst.Index,
        cst.Integer,
        cst.Colon,
    ),
    *(
        cst.UnaryOperation,
        cst.Minus,
        cst.BinaryOperation,
        cst.Subtract,
        cst.Tuple,
        cst.Element,
        cst.Call,
        cst.Arg,
    ),
    *(cst.LeftParen, cst.RightParen, cst.LeftSquareBracket, cst.RightSquareBracket),
}
