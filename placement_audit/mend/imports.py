"""How a placement is spelled in a module: by the name that it has there, or by one that an import will give it."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

import libcst as cst
from libcst.metadata import GlobalScope, ImportAssignment, MetadataWrapper, Scope, ScopeProvider

HOME = "torch.distributed.tensor"
"""Where placements are imported from."""

_HOMES = tuple(
    f"torch.distributed.{name}"
    for name in ("tensor", "_tensor", "tensor.placement_types", "_tensor.placement_types")
)
_LONGEST_LINE = 88
"""Of an import that a name is added to; a longer one gets a line of its own."""


class Refused(Exception):
    """An edit that is not made.

    Attributes:
        reason: one sentence, without a full stop.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Names:
    """The names of placements in one module.

    Attributes:
        missing: those that an import must bring, in the order they were asked for.
    """

    def __init__(self, wrapper: MetadataWrapper) -> None:
        """Look at what the module imports."""
        self.missing: list[str] = []
        self._scopes = wrapper.resolve(ScopeProvider)
        self._for_typing = _OnlyForTyping.of(wrapper.module)

    def spell(self, name: str, at: cst.CSTNode) -> str:
        """How ``name`` (Shard, Replicate, Partial) is to be written where ``at`` stands.

        Raises:
            Refused: the name means something else there.
        """
        scope = self._scopes.get(at)
        if scope is None:
            raise Refused("the call is at a place whose names cannot be told")
        for local, meaning in self._imported(scope):
            if meaning in {f"{home}.{name}" for home in _HOMES}:
                return local
            if meaning in _HOMES and "." not in local:
                return f"{local}.{name}"
        bound = [a for a in scope[name] if getattr(a, "node", None) not in self._for_typing]
        if bound:
            raise Refused(f"the name {name} means something else in this file")
        if name not in self.missing:
            self.missing.append(name)
        return name

    def _imported(self, scope: Scope) -> list[tuple[str, str]]:
        """(name, what it means) of each module-level import that ``scope`` sees."""
        found = []
        for a in scope.globals.assignments:
            if not isinstance(a, ImportAssignment) or a.node in self._for_typing:
                continue
            if all(isinstance(seen.scope, GlobalScope) for seen in scope[a.name]):
                found += [(a.name, q.name) for q in a.get_qualified_names_for(a.name)]
        return sorted(found)


class _OnlyForTyping(cst.CSTVisitor):
    """Imports under ``if TYPE_CHECKING:``, which are not there when the code runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[cst.CSTNode] = set()
        self._inside = 0

    @classmethod
    def of(cls, module: cst.Module) -> set[cst.CSTNode]:
        visitor = cls()
        module.visit(visitor)
        return visitor.found

    def visit_If_body(self, node: cst.If) -> None:
        self._inside += _tests_typing(node)

    def leave_If_body(self, node: cst.If) -> None:
        self._inside -= _tests_typing(node)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        if self._inside:
            self.found.add(node)

    def visit_Import(self, node: cst.Import) -> None:
        if self._inside:
            self.found.add(node)


def _tests_typing(node: cst.If) -> bool:
    name = node.test.attr if isinstance(node.test, cst.Attribute) else node.test
    return isinstance(name, cst.Name) and name.value == "TYPE_CHECKING"


# --------------------------------------------------------------------------- adding


def add_imports(module: cst.Module, names: Sequence[str]) -> cst.Module:
    """Import ``names`` from `HOME`: in the import that is there, else in one of its own after torch's others."""
    if not names:
        return module
    body = list(module.body)
    for at, statement in enumerate(body):
        longer = _with_names(module, statement, names)
        if longer is not None:
            return module.with_changes(body=[*body[:at], longer, *body[at + 1 :]])
    line = cst.SimpleStatementLine(
        [
            cst.ImportFrom(
                module=cst.helpers.parse_template_expression(HOME),  # type: ignore[arg-type]
                names=[cst.ImportAlias(cst.Name(name)) for name in sorted(names)],
            )
        ]
    )
    at = _place(body)
    if at == 0 and body:
        first = body[0]
        if isinstance(first, cst.SimpleStatementLine | cst.BaseCompoundStatement) and not first.leading_lines:
            body[0] = first.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    body.insert(at, line)
    return module.with_changes(body=body)


def _place(body: Sequence[cst.BaseStatement]) -> int:
    """Where a new import goes: after the last of torch's at the top, the last one at all, or the docstring."""
    after_torch = after_any = after_docstring = 0
    for at, statement in enumerate(body, start=1):
        if not isinstance(statement, cst.SimpleStatementLine):
            continue
        (first, *_) = statement.body
        if at == 1 and isinstance(first, cst.Expr) and isinstance(first.value, cst.SimpleString):
            after_docstring = at
        if isinstance(first, cst.Import | cst.ImportFrom):
            after_any = at
            if _source_of(first).partition(".")[0] == "torch":
                after_torch = at
    return after_torch or after_any or after_docstring


def _source_of(node: cst.Import | cst.ImportFrom) -> str:
    dotted = node.names[0].name if isinstance(node, cst.Import) else node.module
    if dotted is None or (isinstance(node, cst.ImportFrom) and node.relative):
        return ""
    return cst.helpers.get_full_name_for_node_or_raise(dotted)


def _with_names(
    module: cst.Module, statement: cst.BaseStatement, names: Sequence[str]
) -> cst.BaseStatement | None:
    """The statement with more names, if it imports from `HOME` and has room."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    node = statement.body[0]
    if (
        not isinstance(node, cst.ImportFrom)
        or isinstance(node.names, cst.ImportStar)
        or _source_of(node) != HOME
    ):
        return None
    aliases = list(node.names)
    for name in names:
        aliases = _inserted(node, aliases, name)
    longer = statement.with_changes(body=[node.with_changes(names=aliases)])
    lines = module.code_for_node(longer.with_changes(leading_lines=[])).splitlines()
    if max(map(len, lines)) > _LONGEST_LINE and not node.lpar:
        return None
    return longer


def _inserted(node: cst.ImportFrom, aliases: list[cst.ImportAlias], name: str) -> list[cst.ImportAlias]:
    """One more name, in its place where the names are in order, else at the end."""
    keys = [cst.helpers.get_full_name_for_node_or_raise(a.name) for a in aliases]
    folded = [key.lower() for key in keys]
    at = len(keys)
    if folded == sorted(folded):
        at = bisect(folded, name.lower())
    elif keys == sorted(keys):
        at = bisect(keys, name)
    comma = aliases[0].comma if len(aliases) > 1 else None
    if not isinstance(comma, cst.Comma):
        space = node.lpar.whitespace_after if node.lpar else cst.SimpleWhitespace(" ")
        comma = cst.Comma(whitespace_after=space)
    comma = cst.Comma(whitespace_after=without_comments(comma.whitespace_after))
    new = cst.ImportAlias(cst.Name(name), comma=comma)
    if at == len(aliases):
        last = aliases[-1]
        new = new.with_changes(comma=last.comma)
        aliases = [*aliases[:-1], last.with_changes(comma=comma)]
    return [*aliases[:at], new, *aliases[at:]]


def without_comments(space: cst.BaseParenthesizableWhitespace) -> cst.BaseParenthesizableWhitespace:
    """The same blank space, with neither the comments nor the empty lines in it."""
    if isinstance(space, cst.ParenthesizedWhitespace):
        return space.with_changes(
            first_line=space.first_line.with_changes(comment=None, whitespace=cst.SimpleWhitespace("")),
            empty_lines=[],
        )
    return space
