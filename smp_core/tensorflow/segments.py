"""From a traced graph to operations as data, and from a segment to a function that runs it."""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from smp_core.tensorflow import tensorflow_parts as parts
from smp_core.tensorflow.placement import TracedOperation
from smp_core.tensorflow.segmentation import COPIED, GraphOperation, Segment, Value
from smp_core.tensorflow.tensorflow_parts import tf

_TAPE = "gradient_tape/"


#: Attributes that are names or numbers of one process, or that no result depends on.
_LOCAL_ATTRIBUTES = frozenset(
    {
        "config_proto",
        "container",
        "debug_name",
        "executor_type",
        "message",
        "seed",
        "seed2",
        "shared_name",
        "token",
    }
)


class Functions:
    """The functions of a graph, serialised, by name."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._functions = functions
        self._digests: dict[str, str] = {}

    def reached(self, nodes: Iterable[Any]) -> list[Any]:
        """The functions that serialised operations call, by themselves or through others."""
        found: dict[str, Any] = {}
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            names = {node.op}
            for attribute in node.attr.values():
                names |= {attribute.func.name, attribute.s.decode(errors="replace")}
                names |= {each.name for each in attribute.list.func}
            for name in sorted(names & self._functions.keys() - found.keys()):
                found[name] = self._functions[name]
                waiting += self._functions[name].node_def
        return [found[name] for name in sorted(found)]

    def attributes(self, node: Any) -> Iterator[str]:
        """The attributes of a serialised operation that are the same on ranks that traced the same graph, in words."""
        for name in sorted(node.attr):
            if name.startswith("_") or name in _LOCAL_ATTRIBUTES:
                continue
            value = node.attr[name]
            kind = value.WhichOneof("value")
            if kind == "func":
                yield f"{name}={self._digest(value.func.name)}"
            elif kind == "list" and value.list.func:
                yield f"{name}={[self._digest(each.name) for each in value.list.func]}"
            elif kind in ("i", "f", "b", "s"):
                yield f"{name}={getattr(value, kind)!r}"
            elif kind != "tensor":  # of a constant, which is described by its value
                yield f"{name}={_digest(value)}"

    def _digest(self, name: str) -> str:
        """A number of what a function computes, whatever it and its operations are called."""
        if name not in self._functions:
            return name
        if name not in self._digests:
            function = self._functions[name]
            places = {each.name: f"a{at}" for at, each in enumerate(function.signature.input_arg)}
            places |= {each.name: f"o{at}" for at, each in enumerate(function.node_def)}
            lines = [
                " ".join(
                    [
                        node.op,
                        *_inputs(node, places),
                        *self.attributes(node),
                        *_constants(node),
                    ]
                )
                for node in function.node_def
            ]
            lines += [
                _renamed(function.ret[each.name], places) for each in function.signature.output_arg
            ]
            self._digests[name] = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        return self._digests[name]


def _inputs(node: Any, places: Mapping[str, str]) -> list[str]:
    """The inputs of an operation in a function. Control inputs are sorted by place: TensorFlow sorts them by name, and
    names of layers differ between ranks.
    """
    renamed = [_renamed(each, places) for each in node.input]
    control = sorted(each for each in renamed if each.startswith("^"))
    return [each for each in renamed if not each.startswith("^")] + control


def _renamed(name: str, places: Mapping[str, str]) -> str:
    """The name of a tensor in a function, such as ``add:z:0``, by the place of its operation."""
    control, bare = ("^", name[1:]) if name.startswith("^") else ("", name)
    operation, colon, output = bare.partition(":")
    return f"{control}{places.get(operation, operation)}{colon}{output}"


def _constants(node: Any) -> Iterator[str]:
    if node.op == "Const" and node.attr["dtype"].type != tf.string.as_datatype_enum:
        yield _digest(node.attr["value"])


def _digest(message: Any) -> str:
    return hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, slots=True)
class Graph:
    """A traced function as data, with what leads back to TensorFlow.

    Attributes:
        concrete: the traced function.
        nodes: its operations.
        traced: the same, as data.
        index: the index of each operation, by name.
        arguments: for each argument, its tensor.
        captures: for each captured tensor, the one outside and its placeholder.
        outputs: the tensors that it returns.
        effects: the operations that run for what they change.
        versions: those of the serialised graph.
        functions: its functions: branches, loop bodies and nested functions.
    """

    concrete: Any
    nodes: tuple[Any, ...]
    traced: tuple[TracedOperation, ...]
    index: Mapping[str, int]
    arguments: tuple[Value, ...]
    captures: tuple[tuple[Any, Value], ...]
    outputs: tuple[Value, ...]
    effects: tuple[int, ...]
    versions: Any
    functions: Functions

    @property
    def handles(self) -> dict[Value, Any]:
        """The variables that functions of segments capture: those that are no tensors of an outer graph."""
        return {
            inner: outer
            for outer, inner in self.captures
            if outer.dtype == tf.resource and not tf.is_symbolic_tensor(outer)
        }

    @property
    def fed_captures(self) -> list[tuple[Any, Value]]:
        """The other captures: their tensors are passed to the functions, as those of arguments are."""
        handles = self.handles
        return [(outer, inner) for outer, inner in self.captures if inner not in handles]

    @property
    def given(self) -> list[Value]:
        """The tensors that a run of the graph is given: its arguments, then those of ``fed_captures``."""
        return [*self.arguments, *(inner for _, inner in self.fed_captures)]

    def value(self, tensor: Any) -> Value:
        """The tensor as data."""
        return Value(self.index[tensor.op.name], tensor.value_index)

    def tensor(self, value: Value) -> Any:
        """The tensor in the graph."""
        return self.nodes[value.operation].outputs[value.output]

    def detail(self, operation: int) -> str:
        """The shapes of what an operation gives, its attributes, and the value of a constant.

        Without names, and without strings, which may hold them: those need not be the same on every rank.
        """
        node = self.nodes[operation]
        shapes = ", ".join(str(each.shape) for each in node.outputs)
        found = " ".join([shapes, *self.functions.attributes(node.node_def)])
        if node.type != "Const" or node.outputs[0].dtype == tf.string:
            return found
        value = tf.get_static_value(node.outputs[0])
        known = value.tolist() if value.size <= 4 else hashlib.sha256(value.tobytes()).hexdigest()
        return f"{found} = {known}"


def read(concrete: Any) -> Graph:
    """Read a traced function."""
    graph = concrete.graph
    nodes = _ordered(graph.get_operations())
    index = {each.name: at for at, each in enumerate(nodes)}
    scopes, waits = _scopes(nodes), _waits(nodes)

    def origin(node: Any) -> int | None:
        found = parts.origin_of(node)
        if found is not None and found.graph is graph:
            return index[found.name]
        at = node.name.rfind(_TAPE)
        if at < 0:
            return None
        # The tape names an operation by the forward operation, or by its scope.
        forward = node.name[at + len(_TAPE) :].rpartition("/")[0]
        own = index.get(forward)
        return (
            own if own is not None and parts.tag_of(nodes[own]) is not None else scopes.get(forward)
        )

    traced = []
    for node in nodes:
        forward = origin(node)
        traced.append(
            TracedOperation(
                node.name,
                node.type,
                tuple(Value(index[each.op.name], each.value_index) for each in node.inputs),
                tuple(sorted(_controls(node, waits))),
                tuple(each.dtype.name for each in node.outputs),
                parts.tag_of(node),
                forward,
                forward is not None,
            )
        )

    def value(tensor: Any) -> Value:
        return Value(index[tensor.op.name], tensor.value_index)

    definition = graph.as_graph_def()
    captures = tuple((outer, value(inner)) for outer, inner in graph.captures)
    count = len(graph.inputs) - len(captures)
    return Graph(
        concrete,
        nodes,
        tuple(traced),
        index,
        tuple(value(each) for each in graph.inputs[:count]),
        captures,
        tuple(value(each) for each in graph.outputs),
        tuple(sorted(_awaited(graph.control_outputs, waits))),
        definition.versions,
        Functions({each.signature.name: each for each in definition.library.function}),
    )


def _waits(nodes: Sequence[Any]) -> dict[str, set[int]]:
    """For each operation, by name, those that one behind it waits for: itself, or those for which it only waits."""
    found: dict[str, set[int]] = {}
    for at, node in enumerate(nodes):
        only_waits = node.type == "NoOp"
        found[node.name] = _awaited(node.control_inputs, found) if only_waits else {at}
    return found


def _controls(node: Any, waits: Mapping[str, set[int]]) -> set[int]:
    """The operations that must run before one, whose results it does not take.

    TensorFlow has an operation behind others through a constant that it takes, if that is behind them, and a constant
    is copied without its order.
    """
    constants = (each.op for each in node.inputs if each.op.type == "Const")
    before = [node.control_inputs, *(each.control_inputs for each in constants)]
    return set().union(*(_awaited(each, waits) for each in before))


def _awaited(nodes: Sequence[Any], waits: Mapping[str, set[int]]) -> set[int]:
    """The operations that one behind all of these waits for."""
    return set().union(*(waits[node.name] for node in nodes))


def _ordered(nodes: Sequence[Any]) -> tuple[Any, ...]:
    """The operations in the order of creation, but each after those that must run before it."""
    place = {node.name: at for at, node in enumerate(nodes)}
    before = [
        {place[each.op.name] for each in node.inputs}
        | {place[each.name] for each in node.control_inputs}
        for node in nodes
    ]
    after: list[list[int]] = [[] for _ in nodes]
    for at, each in enumerate(before):
        for source in each:
            after[source].append(at)
    left = [len(each) for each in before]
    ready = [at for at, count in enumerate(left) if not count]
    found = []
    while ready:
        at = heapq.heappop(ready)
        found.append(nodes[at])
        for user in after[at]:
            left[user] -= 1
            if not left[user]:
                heapq.heappush(ready, user)
    return tuple(found)


def _scopes(nodes: Sequence[Any]) -> dict[str, int]:
    """A tagged operation for each name scope whose operations have one tag."""
    found: dict[str, int | None] = {}
    tags: dict[str, int] = {}
    for at, node in enumerate(nodes):
        tag = parts.tag_of(node)
        if tag is None:
            continue
        scope = node.name.rpartition("/")[0]
        if tags.setdefault(scope, tag) != tag:
            found[scope] = None
        else:
            found.setdefault(scope, at)
    return {scope: at for scope, at in found.items() if at is not None}


def build(graph: Graph, operations: Sequence[GraphOperation], segment: Segment) -> Any:
    """A function of the segment's inputs, then its arguments that are no handles, that returns its outputs."""
    inside = set(segment.operations)
    handles = graph.handles
    captured = {value for _, value in graph.captures}
    fed = [*segment.inputs, *fed_arguments(graph, segment)]
    copies: set[int] = {
        value.operation
        for value in segment.arguments
        if value not in captured and graph.nodes[value.operation].type != "Placeholder"
    }
    definition = tf.compat.v1.GraphDef()
    for at in sorted(inside | copies):
        node = definition.node.add()
        node.CopyFrom(graph.nodes[at].node_def)
        node.attr.pop("_class", None)  # names operations of other segments
        kept = [each for each in node.input if not each.startswith("^")]
        # Those of the traced operation may name one that only waits, and is in no segment.
        controls = operations[at].controls if operations[at].place != COPIED else ()
        del node.input[:]
        node.input.extend(kept)
        node.input.extend(f"^{operations[each].name}" for each in controls if each in inside)
    definition.versions.CopyFrom(graph.versions)
    definition.library.function.extend(graph.functions.reached(definition.node))

    specs = [tf.TensorSpec(graph.tensor(each).shape, graph.tensor(each).dtype) for each in fed]
    wanted = [graph.tensor(each).name for each in segment.outputs]
    used = set(segment.arguments)

    @tf.function(autograph=False, input_signature=specs)  # type: ignore[untyped-decorator]
    def run(*tensors: Any) -> list[Any]:
        here = tf.compat.v1.get_default_graph()
        given = {graph.tensor(each).name: tensor for each, tensor in zip(fed, tensors, strict=True)}
        for each, outer in handles.items():
            if each in used:
                given[graph.tensor(each).name] = here.capture(outer)
        found: list[Any] = tf.graph_util.import_graph_def(
            definition, input_map=given, return_elements=wanted, name=""
        )
        return found or []

    return run.get_concrete_function()


def fed_arguments(graph: Graph, segment: Segment) -> list[Value]:
    """The arguments of a segment that its caller passes: placeholders of tensors, no constants and no handles."""
    handles = graph.handles
    return [
        value
        for value in segment.arguments
        if graph.nodes[value.operation].type == "Placeholder" and value not in handles
    ]
