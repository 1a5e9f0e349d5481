"""Where a name in a method comes from: straight-line reading of a libcst tree, with no guess where it is not straight.

A name is what the nearest binding before it says, in its own block or in a block around it. What a loop, a branch or
a ``with`` in between may have bound is not known.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import libcst as cst

Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
_Block = cst.BaseSuite | cst.Module


@dataclass(frozen=True, slots=True)
class Binding:
    """One binding of a name.

    Attributes:
        statement: that binds it.
        value: what it is bound to; None where that cannot be told.
    """

    statement: Statement
    value: cst.BaseExpression | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a statement stands."""

    siblings: Sequence[cst.CSTNode]
    index: int
    parent: Statement | None


@dataclass(slots=True)
class Flow:
    """The statements of one function and where they stand.

    Attributes:
        function: that is read.
        places: by statement identity.
        owner: the statement of every node in the function, by identity.
    """

    function: cst.FunctionDef
    places: dict[int, Place] = field(default_factory=dict)
    owner: dict[int, Statement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._enter(self.function.body, None)

    def _enter(self, block: _Block, parent: Statement | None) -> None:
        for index, statement in enumerate(block.body):
            if not isinstance(statement, cst.SimpleStatementLine | cst.BaseCompoundStatement):
                continue  # "if x: y" on one line: nothing of it is followed
            self.places[id(statement)] = Place(block.body, index, parent)
            for node in nodes(statement):
                self.owner[id(node)] = statement
            for inner in _blocks(statement):
                self._enter(inner, statement)

    def calls(self) -> Iterator[cst.Call]:
        """All calls of the function, each before those in it."""
        return (node for node in nodes(self.function.body) if isinstance(node, cst.Call))

    def binding(self, name: str, at: Statement) -> Binding | None:
        """The nearest binding of a name before a statement; None where only a parameter or a global can be it."""
        statement: Statement | None = at
        while statement is not None:
            place = self.places[id(statement)]
            for before in reversed(place.siblings[: place.index]):
                if not isinstance(before, cst.SimpleStatementLine | cst.BaseCompoundStatement):
                    continue
                if name in bound(before):
                    return Binding(before, _value(before, name))
            statement = place.parent
        return None

    def value(self, node: cst.BaseExpression, at: Statement) -> tuple[cst.BaseExpression, Statement]:
        """Follow a name to the expression it stands for; what is no name, or cannot be followed, is itself."""
        while isinstance(node, cst.Name):
            found = self.binding(node.value, at)
            if found is None or found.value is None:
                break
            node, at = found.value, found.statement
        return node, at


_BLANK = cst.BaseParenthesizableWhitespace | cst.TrailingWhitespace | cst.EmptyLine | cst.Comma | cst.Dot


def nodes(root: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and all below it but white space, each before what is in it."""
    todo = [root]
    while todo:
        node = todo.pop()
        yield node
        # CSTNode.children would run a visitor over every node: ten times slower.
        for name in reversed(_fields(type(node))):
            value = getattr(node, name)
            inner = reversed(value) if isinstance(value, list | tuple) else (value,)
            todo.extend(n for n in inner if isinstance(n, cst.CSTNode) and not isinstance(n, _BLANK))


@functools.cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if "whitespace" not in field.name)


def names(root: cst.CSTNode) -> list[str]:
    """Names read or bound in an expression or statement; attribute and keyword names are not among them."""
    found = []
    skipped: set[int] = set()
    for node in nodes(root):
        match node:
            case cst.Attribute(attr=attr):
                skipped.add(id(attr))
            case cst.Arg(keyword=cst.Name() as keyword):
                skipped.add(id(keyword))
            case cst.Name(value=value) if id(node) not in skipped:
                found.append(value)
    return found


def bound(root: cst.CSTNode) -> set[str]:
    """Names that a statement, or anything in it, may bind."""
    found: set[str] = set()
    for node in nodes(root):
        match node:
            case cst.AssignTarget(target=target) | cst.NamedExpr(target=target) | cst.For(target=target):
                found |= _targets(target)
            case cst.AnnAssign(target=target) | cst.AugAssign(target=target):
                found |= _targets(target)
            case cst.AsName(name=target):
                found |= _targets(target)
            case cst.FunctionDef(name=name) | cst.ClassDef(name=name):
                found.add(name.value)
            case cst.Del(target=target):
                found |= _targets(target)
            case cst.ImportAlias(name=target, asname=None):
                found.add(dotted(target).partition(".")[0])
    return found


def dotted(node: cst.CSTNode) -> str:
    """``a.b.c`` of a chain of names; "" of anything else."""
    match node:
        case cst.Name(value=value):
            return value
        case cst.Attribute(value=value, attr=attr):
            head = dotted(value)
            return f"{head}.{attr.value}" if head else ""
    return ""


def same(one: cst.BaseExpression, other: cst.BaseExpression) -> bool:
    """Whether two expressions are the same code, however it is laid out."""
    first, second = (ast.parse(f"({code(node)}\n)", mode="eval") for node in (one, other))
    return ast.dump(first) == ast.dump(second)


def code(node: cst.CSTNode) -> str:
    """The text of a node, as it stands."""
    return cst.Module([]).code_for_node(node)


def _targets(node: cst.CSTNode) -> set[str]:
    match node:
        case cst.Name(value=value):
            return {value}
        case cst.Tuple(elements=elements) | cst.List(elements=elements):
            return {name for element in elements for name in _targets(element.value)}
    return set()


def _value(statement: Statement, name: str) -> cst.BaseExpression | None:
    if not isinstance(statement, cst.SimpleStatementLine):
        return None
    # Later ones of "a = 1; a = 2" win; a name bound inside an expression (:=) is not followed.
    for small in reversed(statement.body):
        match small:
            case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=target))], value=value):
                if target == name:
                    return value
            case cst.AnnAssign(target=cst.Name(value=target), value=value):
                if target == name:
                    return value
            case cst.Assign(targets=[cst.AssignTarget(target=cst.Tuple(elements=to))], value=value):
                if name in _targets(cst.Tuple(elements=to)):
                    return _element(to, value, name)
        if name in bound(small):
            return None
    return None


def _element(
    to: Sequence[cst.BaseElement], value: cst.BaseExpression, name: str
) -> cst.BaseExpression | None:
    """The part of an unpacked value that one name gets: ``value[i]`` where it is not written out."""
    plain = [element.value for element in to if isinstance(element, cst.Element)]
    at = next((i for i, one in enumerate(plain) if isinstance(one, cst.Name) and one.value == name), None)
    if at is None or len(plain) != len(to):
        return None
    if isinstance(value, cst.Tuple) and len(value.elements) == len(to):
        element = value.elements[at]
        return element.value if isinstance(element, cst.Element) else None
    index = f"-{len(to) - at}"
    return cst.Subscript(
        value=value, slice=[cst.SubscriptElement(slice=cst.Index(cst.parse_expression(index)))]
    )


def _blocks(statement: Statement) -> Iterator[cst.BaseSuite]:
    """The blocks directly inside a compound statement, but not those of functions and classes."""
    if isinstance(statement, cst.FunctionDef | cst.ClassDef):
        return
    for child in statement.children:
        if isinstance(child, cst.IndentedBlock):
            yield child
        elif isinstance(child, cst.Else | cst.If | cst.Finally | cst.ExceptHandler | cst.MatchCase):
            # An elif is an If inside the orelse of the first; it has no siblings of its own.
            yield from _blocks(child)  # type: ignore[arg-type]
