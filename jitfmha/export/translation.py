"""Translates plain functions of numbers from Python to C++.

So a policy is written once, in Python, and what is exported decides as Python does. Known are

* modules of constants, functions, and structs (a ``NamedTuple`` or a frozen dataclass, with methods
  of which some may be class or static methods), all with annotations;
* ``int``, ``float``, ``bool``, sequences, and the structs and literal types that
  :class:`Vocabulary` names;
* lists, which an annotated assignment makes of ``[]``, ``[x]``, ``[x] * n``, a comprehension, or a
  sequence that is ``sorted``, and which ``append``, ``heapreplace`` and ``+= [x] * n`` change;
* assignments, ``if``, ``for`` over a ``range`` from 0 or a sequence, ``return``;
* arithmetic, comparisons, ``and``, ``or``, ``not``, conditional expressions, subscripts,
  attributes, calls of what is translated, and ``ceil``, ``gcd``, ``int``, ``isqrt``, ``len``,
  ``max``, ``min``, ``round`` and ``sqrt``.

Everything else is an error that names file and line. An ``int`` has 64 bits in C++, and a ``float``
is a ``double``: the same numbers come out as long as no integer leaves these, and as the compiler
makes no fused multiply-add of two operations.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

_SCALARS = {"int": "std::int64_t", "float": "double", "bool": "bool"}
_ARITHMETIC = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.LShift: "<<"}
_COMPARISONS = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_SEQUENCE = "Sequence"
_SEQUENCES = (_SEQUENCE, "list")
# By their names in Python: those in C++, the types that they take, and their results.
_KNOWN_FUNCTIONS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "ceil": ("ceiling", ("float",), "int"),
    "gcd": ("std::gcd", ("int", "int"), "int"),
    "int": ("static_cast<std::int64_t>", ("float",), "int"),
    "isqrt": ("isqrt", ("int",), "int"),
    "round": ("rounded", ("float",), "int"),
    "sqrt": ("std::sqrt", ("float",), "float"),
}


class TranslationError(ValueError):
    """Python that has no translation; the text names file and line."""


@dataclass(frozen=True)
class Vocabulary:
    """The types that translated modules use and do not define.

    ``enums`` are literal types with their values, which are names in C++ too; ``structs`` have
    their fields with types, as annotations write them.
    """

    enums: Mapping[str, Sequence[str]]
    structs: Mapping[str, Mapping[str, str]]


class _Signature(NamedTuple):
    name: str  # in C++
    parameters: Mapping[str, str]
    result: str


@dataclass
class _Struct:
    fields: Mapping[str, str]
    methods: dict[str, _Signature] = field(default_factory=dict)


class _Value(NamedTuple):
    """An expression in C++ and its type, as annotations write it."""

    text: str
    type: str


class Translation:
    """Modules in C++: definitions for a namespace, and values for tables."""

    def __init__(self, modules: Sequence[ModuleType], vocabulary: Vocabulary) -> None:
        """Raises :class:`TranslationError` for what has no translation."""
        self.enums = vocabulary.enums
        self.structs = {name: _Struct(fields) for name, fields in vocabulary.structs.items()}
        self.functions: dict[str, _Signature] = {}
        self.constants: dict[str, str] = {}
        sources = [_Source.of(module) for module in modules]
        for source in sources:
            self._declare(source)
        definitions = [text for source in sources for text in self._definitions(source)]
        prototypes = [f"{self._head(x)};" for x in self.functions.values()]
        functions = [
            self._function(source, node, self.functions[node.name])
            for source in sources
            for node in source.functions
        ]
        declared = [f"struct {each.name};" for source in sources for each in source.classes]
        self.cpp = "\n\n".join(
            [
                *(self._enum(name) for name in vocabulary.enums),
                *(_struct_text(name, self._members(name), []) for name in vocabulary.structs),
                # Methods may call functions, and these take structs.
                "\n".join((*declared, *prototypes)),
                *definitions,
                *functions,
            ]
        )
        """The definitions of everything in the modules, in order."""

    def value(self, type_name: str, value: Any) -> str:
        if type_name in self.enums:
            return f"{type_name}::{value}"
        inside = _member_of(type_name)
        if inside:
            return f"{{{', '.join(self.value(inside, each) for each in value)}}}"
        if type_name in self.structs:
            fields = self.structs[type_name].fields.items()
            return f"{{{', '.join(self.value(x, getattr(value, name)) for name, x in fields)}}}"
        return _literal(value)

    # ---- Declarations ----

    def _declare(self, source: _Source) -> None:
        for node in source.classes:
            fields = {
                each.target.id: ast.unparse(each.annotation)
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            }
            self.structs[node.name] = _Struct(fields)
        for node in source.classes:
            methods = (x for x in node.body if isinstance(x, ast.FunctionDef))
            self.structs[node.name].methods.update(
                {each.name: self._signature(source, each, node) for each in methods}
            )
        for function in source.functions:
            self.functions[function.name] = self._signature(source, function, None)
        for name, annotation in source.constants.items():
            self.constants[name] = annotation or type(getattr(source.module, name)).__name__

    def _signature(
        self, source: _Source, node: ast.FunctionDef, owner: ast.ClassDef | None
    ) -> _Signature:
        arguments = node.args
        if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults:
            raise source.refusal(node, "arguments other than plain ones")
        given = arguments.args
        if owner is not None and "staticmethod" not in _decorators(node):
            given = given[1:]
        parameters = {}
        for each in given:
            if each.annotation is None:
                raise source.refusal(node, f"{each.arg} without a type")
            parameters[each.arg] = ast.unparse(each.annotation)
        if node.returns is None:
            raise source.refusal(node, "a function without a type")
        return _Signature(node.name.lstrip("_"), parameters, ast.unparse(node.returns))

    # ---- Definitions ----

    def _definitions(self, source: _Source) -> list[str]:
        """Structs and constants, in the order of the module."""
        texts = []
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                methods = [
                    self._function(source, x, self.structs[node.name].methods[x.name], node)
                    for x in node.body
                    if isinstance(x, ast.FunctionDef)
                ]
                members = self._members(node.name)
                texts.append(_comment(node) + _struct_text(node.name, members, methods))
            else:
                names = source.names_of(node)
                texts += [self._constant(source, node, name) for name in names]
        return texts

    def _members(self, name: str) -> list[str]:
        return [f"{self._type(x)} {each};" for each, x in self.structs[name].fields.items()]

    def _enum(self, name: str) -> str:
        return f"enum class {name} {{ {', '.join(self.enums[name])} }};"

    def _constant(self, source: _Source, node: ast.stmt, name: str) -> str:
        value, annotation = getattr(source.module, name), self.constants[name]
        if isinstance(value, dict):
            key, of = _arguments_of(annotation)
            if key not in self.enums or set(value) != set(self.enums[key]):
                raise source.refusal(node, f"{name}, which has no value for each {key}")
            values = ", ".join(self.value(of, value[each]) for each in self.enums[key])
            return f"constexpr {self._type(of)} {_constant_name(name)}[] = {{{values}}};"
        if annotation not in (*_SCALARS, *self.structs):
            raise source.refusal(node, f"{name}, a {annotation}")
        text = self.value(annotation, value)
        return f"constexpr {self._type(annotation)} {_constant_name(name)} = {text};"

    def _head(
        self, signature: _Signature, before: str = "[[maybe_unused]] inline ", after: str = ""
    ) -> str:
        parameters = ", ".join(
            f"{self._parameter_type(x)} {name}" for name, x in signature.parameters.items()
        )
        return f"{before}{self._type(signature.result)} {signature.name}({parameters}){after}"

    def _function(
        self,
        source: _Source,
        node: ast.FunctionDef,
        signature: _Signature,
        owner: ast.ClassDef | None = None,
    ) -> str:
        decorators = _decorators(node)
        is_static = "staticmethod" in decorators or "classmethod" in decorators
        before, after = ("static ", "") if is_static else ("", " const")
        head = self._head(signature) if owner is None else self._head(signature, before, after)
        body = _Body(self, source, signature, owner)
        lines = body.block(node.body, dict(signature.parameters))
        return f"{_comment(node)}{head} {{\n" + "\n".join(lines) + "\n}"

    def _type(self, annotation: str) -> str:
        inside = _member_of(annotation)
        if inside:
            return f"std::vector<{self._type(inside)}>"
        return _SCALARS.get(annotation, annotation)

    def _parameter_type(self, annotation: str) -> str:
        if annotation in _SCALARS or annotation in self.enums:
            return self._type(annotation)
        return f"const {self._type(annotation)}&"


class _Source:
    """A module with its syntax tree, and the names that it defines."""

    def __init__(self, module: ModuleType, name: str, tree: ast.Module) -> None:
        self.module, self.name, self.tree = module, name, tree
        self.classes = [x for x in tree.body if isinstance(x, ast.ClassDef)]
        self.functions = [x for x in tree.body if isinstance(x, ast.FunctionDef)]
        self.constants = {
            name: ast.unparse(x.annotation) if isinstance(x, ast.AnnAssign) else None
            for x in tree.body
            for name in self.names_of(x)
        }

    @classmethod
    def of(cls, module: ModuleType) -> _Source:
        name = Path(str(module.__file__)).name
        return cls(module, name, ast.parse(inspect.getsource(module)))

    def names_of(self, node: ast.stmt) -> list[str]:
        """The constants that a statement of the module defines."""
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)):
            return []
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return []  # the docstring
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            return [node.target.id]
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            return [ast.unparse(x) for x in names]
        raise self.refusal(node, "this statement")

    def refusal(self, node: ast.AST, what: str) -> TranslationError:
        line = getattr(node, "lineno", 0)
        return TranslationError(f"{self.name}, line {line}: {what} cannot be translated to C++")


class _Body:
    """The statements and expressions of one function."""

    def __init__(
        self,
        translation: Translation,
        source: _Source,
        signature: _Signature,
        owner: ast.ClassDef | None,
    ) -> None:
        self.translation, self.source, self.signature = translation, source, signature
        self.owner = None if owner is None else owner.name
        self.scope: dict[str, str] = {}

    def block(self, nodes: Sequence[ast.stmt], scope: dict[str, str]) -> list[str]:
        """The lines of a block; what it defines is known inside of it only."""
        outer, self.scope = self.scope, {**self.scope, **scope}
        lines = [line for node in nodes for line in self.statement(node)]
        self.scope = outer
        return [f"  {line}" for line in lines]

    def statement(self, node: ast.stmt) -> list[str]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return []  # the docstring
        if isinstance(node, ast.Return) and node.value is not None:
            value = self.converted(node, self.value(node.value), self.signature.result)
            return [f"return {value};"]
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            return [self.assignment(node, node.targets[0], self.value(node.value))]
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            return self.new_list(node, node.value)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            return [self.change(node, node.value)]
        if isinstance(node, ast.AugAssign) and isinstance(node.value, ast.BinOp):
            repeated = self.repeated(node, node.value, self.value(node.target))
            if repeated:
                of = self.list_of(node, node.target).text
                return [f"{of}.insert({of}.end(), {repeated});"]
        if isinstance(node, ast.AugAssign):
            changed = ast.copy_location(ast.BinOp(node.target, node.op, node.value), node)
            return [self.assignment(node, node.target, self.value(changed))]
        if isinstance(node, ast.If):
            lines = [f"if ({self.condition(node.test)}) {{", *self.block(node.body, {})]
            if node.orelse:
                lines += ["} else {", *self.block(node.orelse, {})]
            return [*lines, "}"]
        if isinstance(node, ast.For) and not node.orelse:
            return self.loop(node)
        raise self.source.refusal(node, "this statement")

    def assignment(self, node: ast.stmt, target: ast.expr, value: _Value) -> str:
        if not isinstance(target, ast.Name):
            raise self.source.refusal(node, "an assignment to anything but a name")
        known = self.scope.get(target.id)
        if known is None:
            self.scope[target.id] = value.type
            return f"{self.translation._type(value.type)} {target.id} = {value.text};"
        return f"{target.id} = {self.converted(node, value, known)};"

    def new_list(self, node: ast.AnnAssign, value: ast.expr) -> list[str]:
        """A list, which is a copy: no other name is one for it."""
        kind, name = ast.unparse(node.annotation), ast.unparse(node.target)
        inside = _member_of(kind)
        if not inside or not kind.startswith("list[") or name in self.scope:
            raise self.source.refusal(node, "an annotation of anything but a new list")
        self.scope[name] = kind
        head, made = f"{self.translation._type(kind)} {name}", _Value(name, kind)
        if isinstance(value, ast.ListComp) and len(value.generators) == 1:
            (each,) = value.generators
            name_of, of = ast.Name(name, ast.Load()), ast.copy_location
            adds = ast.Call(ast.Attribute(name_of, "append", ast.Load()), [value.elt], [])
            if not each.ifs:
                body: list[ast.stmt] = [of(ast.Expr(of(adds, node)), node)]
                return [f"{head};", *self.loop(of(ast.For(each.target, each.iter, body, []), node))]
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "sorted":
            sequence = self.value(value.args[0])
            if [ast.unparse(x) for x in value.keywords] == ["reverse=True"] and inside == "float":
                return [f"{head} = descending({sequence.text});"]
        repeated = self.repeated(node, value, made)
        if repeated:
            return [f"{head}({repeated});"]
        if isinstance(value, ast.List):
            members = (self.converted(node, self.value(x), inside) for x in value.elts)
            return [f"{head} = {{{', '.join(members)}}};"]
        raise self.source.refusal(node, "this list")

    def repeated(self, node: ast.AST, value: ast.expr, of: _Value) -> str | None:
        """How often a list of one member is repeated, and that member, for a list ``of`` such."""
        inside = _member_of(of.type)
        if not (isinstance(value, ast.BinOp) and isinstance(value.left, ast.List) and inside):
            return None
        (member,) = value.left.elts
        count = self.converted(node, self.value(value.right), "int")
        text = self.converted(node, self.value(member), inside)
        return f"static_cast<std::size_t>({count}), {text}"

    def list_of(self, node: ast.AST, value: ast.expr) -> _Value:
        """A list that may change: one that a name of this function is for, or a member of it."""
        found, name = self.value(value), value
        while isinstance(name, ast.Subscript):
            name = name.value
        if not isinstance(name, ast.Name) or not found.type.startswith("list["):
            raise self.source.refusal(node, f"a change of a {found.type}")
        return found

    def change(self, node: ast.stmt, call: ast.Call) -> str:
        """A statement that changes a list."""
        function = call.func
        if isinstance(function, ast.Attribute) and function.attr == "append":
            (member,) = call.args
            changed, form = self.list_of(node, function.value), "{}.push_back({});"
        elif ast.unparse(function) == "heapreplace":
            of, member = call.args
            changed, form = self.list_of(node, of), "heapreplace({}, {});"
        else:
            raise self.source.refusal(node, "this statement")
        inside = str(_member_of(changed.type))
        return form.format(changed.text, self.converted(node, self.value(member), inside))

    def loop(self, node: ast.For) -> list[str]:
        call, name = node.iter, node.target
        if not isinstance(name, ast.Name):
            raise self.source.refusal(node, "a loop with anything but a name")
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "range":
            each = self.value(call)
            inside = _member_of(each.type)
            if not inside:
                raise self.source.refusal(node, f"a loop over a {each.type}")
            head = f"for (const auto& {name.id} : {each.text}) {{"
            return [head, *self.block(node.body, {name.id: inside}), "}"]
        if len(call.args) != 1:
            raise self.source.refusal(node, "a loop over anything but a range from 0")
        end = self.converted(node, self.value(call.args[0]), "int")
        head = f"for (std::int64_t {name.id} = 0; {name.id} < {end}; ++{name.id}) {{"
        return [head, *self.block(node.body, {name.id: "int"}), "}"]

    # ---- Expressions ----

    def value(self, node: ast.expr) -> _Value:
        kinds: dict[type[ast.expr], Callable[[Any], _Value]] = {
            ast.Constant: self.literal,
            ast.Name: self.name,
            ast.Attribute: self.attribute,
            ast.Subscript: self.subscript,
            ast.UnaryOp: self.unary,
            ast.BinOp: self.binary,
            ast.BoolOp: self.boolean,
            ast.Compare: self.comparison,
            ast.IfExp: self.choice,
            ast.Call: self.call,
        }
        if type(node) not in kinds:
            raise self.source.refusal(node, "this expression")
        return kinds[type(node)](node)

    def literal(self, node: ast.Constant) -> _Value:
        if type(node.value) not in (int, float, bool):
            raise self.source.refusal(node, f"the literal {node.value!r}")
        return _Value(_literal(node.value), type(node.value).__name__)

    def name(self, node: ast.Name) -> _Value:
        if node.id in self.scope:
            return _Value(node.id, self.scope[node.id])
        if node.id in self.translation.constants:
            return _Value(_constant_name(node.id), self.translation.constants[node.id])
        if node.id == "inf":
            return _Value("std::numeric_limits<double>::infinity()", "float")
        raise self.source.refusal(node, f"the name {node.id}, which nothing before it defines,")

    def attribute(self, node: ast.Attribute) -> _Value:
        if self.owner and isinstance(node.value, ast.Name) and node.value.id == "self":
            owner = _Value("this", self.owner)
            member = f"this->{node.attr}"
        else:
            owner = self.value(node.value)
            member = f"{owner.text}.{node.attr}"
        struct = self.translation.structs.get(owner.type)
        if struct is None or node.attr not in struct.fields:
            raise self.source.refusal(node, f"{node.attr} of a {owner.type}")
        return _Value(member, struct.fields[node.attr])

    def subscript(self, node: ast.Subscript) -> _Value:
        of, index = self.value(node.value), self.value(node.slice)
        text = f"{of.text}[static_cast<std::size_t>({index.text})]"
        inside = _member_of(of.type)
        if inside and index.type == "int":
            return _Value(text, inside)
        arguments = _arguments_of(of.type)
        if of.type.startswith("dict[") and index.type == arguments[0]:
            return _Value(text, arguments[1])
        raise self.source.refusal(node, f"a {index.type} as a subscript of a {of.type}")

    def unary(self, node: ast.UnaryOp) -> _Value:
        if isinstance(node.op, ast.Not):
            return _Value(f"!({self.condition(node.operand)})", "bool")
        value = self.value(node.operand)
        if not isinstance(node.op, ast.USub) or value.type not in ("int", "float"):
            raise self.source.refusal(node, "this operator")
        is_negative = value.text.startswith("-")
        return _Value(f"-({value.text})" if is_negative else f"-{value.text}", value.type)

    def binary(self, node: ast.BinOp) -> _Value:
        left, right = self.value(node.left), self.value(node.right)
        if {left.type, right.type} - {"int", "float"}:
            raise self.source.refusal(node, f"arithmetic of a {left.type} and a {right.type}")
        are_ints = left.type == right.type == "int"
        if isinstance(node.op, ast.FloorDiv) and are_ints:
            return _Value(f"floor_div({left.text}, {right.text})", "int")
        if isinstance(node.op, ast.Mod) and are_ints:
            return _Value(f"floor_mod({left.text}, {right.text})", "int")
        sign = "/" if isinstance(node.op, ast.Div) else _ARITHMETIC.get(type(node.op))
        if sign is None:
            raise self.source.refusal(node, "this operator")
        if are_ints and sign != "/":
            return _Value(f"({left.text} {sign} {right.text})", "int")
        return _Value(f"({_as_double(left)} {sign} {_as_double(right)})", "float")

    def boolean(self, node: ast.BoolOp) -> _Value:
        sign = " && " if isinstance(node.op, ast.And) else " || "
        return _Value(f"({sign.join(self.condition(x) for x in node.values)})", "bool")

    def comparison(self, node: ast.Compare) -> _Value:
        if len(node.ops) != 1 or type(node.ops[0]) not in _COMPARISONS:
            raise self.source.refusal(node, "this comparison")
        left, right = self.value(node.left), node.comparators[0]
        sign = _COMPARISONS[type(node.ops[0])]
        if left.type in self.translation.enums and isinstance(right, ast.Constant):
            member = str(right.value)
            if member not in self.translation.enums[left.type]:
                raise self.source.refusal(node, f"{member}, which is no {left.type},")
            return _Value(f"{left.text} {sign} {left.type}::{member}", "bool")
        other = self.value(right)
        if left.type == other.type:
            return _Value(f"{left.text} {sign} {other.text}", "bool")
        if {left.type, other.type} != {"int", "float"}:
            raise self.source.refusal(node, f"a comparison of a {left.type} with a {other.type}")
        return _Value(f"{_as_double(left)} {sign} {_as_double(other)}", "bool")

    def choice(self, node: ast.IfExp) -> _Value:
        values, kind = self.alike(node, [self.value(node.body), self.value(node.orelse)])
        return _Value(f"({self.condition(node.test)} ? {values[0]} : {values[1]})", kind)

    def call(self, node: ast.Call) -> _Value:
        if isinstance(node.func, ast.Attribute):
            return self.method(node, node.func)
        name = ast.unparse(node.func)
        if name in self.translation.functions:
            signature = self.translation.functions[name]
            return self.called(node, signature.name, signature)
        struct = self.owner if name == "cls" and self.owner else name
        if struct in self.translation.structs:
            parameters = self.translation.structs[struct].fields
            text = self.arguments(node, parameters)
            return _Value(f"{struct}{{{text}}}", struct)
        values = [self.value(x) for x in node.args]
        if name in ("min", "max") and len(values) > 1 and values[0].type in _SCALARS:
            texts, kind = self.alike(node, values)
            return _Value(f"std::{name}<{_SCALARS[kind]}>({{{', '.join(texts)}}})", kind)
        types = [x.type for x in values]
        if name in ("min", "max") and _member_of(types[0]) in ("int", "float"):
            return _Value(f"*std::{name}_element({_ends(values[0])})", str(_member_of(types[0])))
        if name in _KNOWN_FUNCTIONS and tuple(types) == _KNOWN_FUNCTIONS[name][1]:
            known, _, result = _KNOWN_FUNCTIONS[name]
            return _Value(f"{known}({', '.join(x.text for x in values)})", result)
        if name == "len" and _member_of(types[0]):
            return _Value(f"static_cast<std::int64_t>({values[0].text}.size())", "int")
        raise self.source.refusal(node, f"a call of {name}")

    def method(self, node: ast.Call, function: ast.Attribute) -> _Value:
        of = function.value
        struct: str | None = None
        if isinstance(of, ast.Name) and of.id in self.translation.structs:
            struct, before = of.id, f"{of.id}::"
        elif isinstance(of, ast.Name) and of.id == "self":
            struct, before = self.owner, "this->"
        else:
            value = self.value(of)
            if value.type == "int" and function.attr == "bit_length":
                return _Value(f"bit_length({value.text})", "int")
            struct, before = value.type, f"{value.text}."
        known = self.translation.structs.get(struct or "")
        if known is None or function.attr not in known.methods:
            raise self.source.refusal(node, f"a call of {ast.unparse(function)}")
        signature = known.methods[function.attr]
        return self.called(node, before + signature.name, signature)

    def called(self, node: ast.Call, name: str, signature: _Signature) -> _Value:
        return _Value(f"{name}({self.arguments(node, signature.parameters)})", signature.result)

    def arguments(self, node: ast.Call, parameters: Mapping[str, str]) -> str:
        if node.keywords or len(node.args) != len(parameters):
            raise self.source.refusal(node, "a call with anything but all arguments in order")
        pairs = zip(node.args, parameters.values(), strict=True)
        return ", ".join(self.converted(node, self.value(x), kind) for x, kind in pairs)

    def condition(self, node: ast.expr) -> str:
        value = self.value(node)
        if value.type != "bool":
            raise self.source.refusal(node, f"a {value.type} as a condition")
        return value.text

    def alike(self, node: ast.expr, values: Sequence[_Value]) -> tuple[list[str], str]:
        """The texts with one type: that of all, or float where some are int."""
        types = {x.type for x in values}
        if len(types) == 1 and types <= {*_SCALARS, *self.translation.structs}:
            return [x.text for x in values], values[0].type
        if types != {"int", "float"}:
            raise self.source.refusal(node, f"a choice among {', '.join(sorted(types))}")
        return [_as_double(x) for x in values], "float"

    def converted(self, node: ast.AST, value: _Value, to: str) -> str:
        """The value where one of the type ``to`` is expected."""
        if value.type == to or (_member_of(to) and _member_of(value.type) == _member_of(to)):
            return value.text
        if (value.type, to) != ("int", "float"):
            raise self.source.refusal(node, f"a {value.type} in the place of a {to}")
        return _as_double(value)


def _as_double(value: _Value) -> str:
    return value.text if value.type == "float" else f"static_cast<double>({value.text})"


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"std::int64_t{{{value}}}" if isinstance(value, int) else repr(value)


def _constant_name(name: str) -> str:
    return "k" + "".join(word.capitalize() for word in name.split("_"))


def _member_of(annotation: str) -> str | None:
    """The type of the members of a sequence or list."""
    kind, _, inside = annotation.partition("[")
    return inside.removesuffix("]") if kind in _SEQUENCES else None


def _ends(sequence: _Value) -> str:
    return f"{sequence.text}.begin(), {sequence.text}.end()"


def _arguments_of(annotation: str) -> list[str]:
    _, _, inside = annotation.partition("[")
    return [x.strip() for x in inside.removesuffix("]").split(",")]


def _decorators(node: ast.FunctionDef) -> list[str]:
    return [ast.unparse(x) for x in node.decorator_list]


def _comment(node: ast.FunctionDef | ast.ClassDef) -> str:
    text = ast.get_docstring(node)
    return f"// {text.splitlines()[0]}\n" if text else ""


def _struct_text(name: str, members: Sequence[str], methods: Sequence[str]) -> str:
    inside = "\n".join(members)
    if methods:
        inside += "\n\n" + "\n\n".join(methods)
    indented = "\n".join(f"  {line}" if line else "" for line in inside.splitlines())
    return f"struct {name} {{\n{indented}\n}};"
